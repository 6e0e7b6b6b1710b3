"""Faults from arguments and from text, and what a text that is none says."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcode.cluster.faults import KINDS, Fault, fail_at, of_worker, parse_faults

few = settings(max_examples=300, deadline=None, derandomize=True, database=None)
# Seconds by default.
SECONDS = {kind: 3.0 if kind == "stall" else 0.0 for kind in KINDS}


def test_the_kinds():
    assert set(KINDS) == {
        *("kill", "vanish", "stall", "raise", "memory"),
        *("corrupt", "cut", "stale", "stranger", "nan"),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind):
    fault = Fault(2, kind, 10, 10, SECONDS[kind])
    assert fail_at(2, 10, kind) == fault
    assert parse_faults(f"{kind}:2@10") == (fault,)
    assert fail_at(2, 10, kind, until=12) == fault._replace(last=12)
    assert parse_faults(f"{kind}:2@10-12") == (fault._replace(last=12),)
    assert parse_faults(f"{kind}:2@10-10") == (fault,)
    assert parse_faults(f"{kind}:0@0") == (fault._replace(worker=0, first=0, last=0),)


@pytest.mark.parametrize(
    ("text", "seconds"), [("0", 0.0), ("3.5", 3.5), (".5", 0.5), ("2.", 2.0), ("1000000", 1e6)]
)
def test_seconds_of_a_stall(text, seconds):
    assert fail_at(1, 5, "stall", seconds=seconds) == Fault(1, "stall", 5, 5, seconds)
    assert parse_faults(f"stall:1@5:{text}") == (Fault(1, "stall", 5, 5, seconds),)
    assert parse_faults(f"stall:1@5-8:{text}") == (Fault(1, "stall", 5, 8, seconds),)


@pytest.mark.parametrize(
    "text",
    [
        "kill:2@10,stall:1@5-8:3.0,corrupt:3@12",
        "  kill:2@10 , stall:1@5-8:3.0\t,\n corrupt:3@12\n",
        ",kill:2@10,,stall:1@5-8:3.0, ,corrupt:3@12,",
        "kill:02@010,stall:1@5-8,corrupt:3@12-12",
    ],
)
def test_several_faults_stay_in_order(text):
    assert parse_faults(text) == (
        Fault(2, "kill", 10, 10, 0.0),
        Fault(1, "stall", 5, 8, 3.0),
        Fault(3, "corrupt", 12, 12, 0.0),
    )


@pytest.mark.parametrize("text", ["", " ", ",", " , ,\n"])
def test_no_faults(text):
    assert parse_faults(text) == ()


def test_a_fault_twice_is_two_faults():
    assert len(parse_faults("kill:1@2,kill:1@2")) == 2


BAD = [
    "kill",
    "kill:1",
    "kill@1",
    "kill:1@",
    "kill:@1",
    ":1@2",
    "1@2",
    "kill:1@2-",
    "kill:1@-2",
    "kill:-1@2",
    "kill:1@2--3",
    "kill:1@2-3-4",
    "kill:1.0@2",
    "kill:1@2.0",
    "kill:1@1e3",
    "kill: 1@2",
    "kill:1 @2",
    "kill:1@2;nan:1@3",
    "kill:1@2 nan:1@3",
    "Kill:1@2",
    "KILL:1@2",
    "explode:1@2",
    "kil:1@2",
    "kill:1@5-3",
    "kill:1@2:3.0",
    "nan:1@2-3:0",
    "stall:1@2:",
    "stall:1@2:.",
    "stall:1@2:1.2.3",
    "stall:1@2:-1",
    "stall:1@2:1e3",
    "stall:1@2:nan",
    "stall:1@2:inf",
    "stall:1@2:1000001",
    "stall:1@2:" + "9" * 400,
    "stall:1:3.0@2",
    # Digits to Python, but not to who reads them.
    "kill:\N{ARABIC-INDIC DIGIT THREE}@2",
    "kill:\N{SUPERSCRIPT TWO}@2",
    # More digits than Python makes an integer of.
    "kill:1@" + "9" * 5000,
    "kill:" + "9" * 5000 + "@1",
    "kill:1@1-" + "9" * 5000,
    "kill:1\n@2",
    "kill:1@2\x00",
]


def says_what_is_wrong(error, part):
    message = str(error.value)
    assert error.type is ValueError
    assert len(message.splitlines()) == 1
    assert message.startswith("`parse_faults` ")
    assert repr(part) in message
    return True


@pytest.mark.parametrize("part", BAD, ids=lambda part: ascii(part[:24]))
def test_a_bad_part_is_named(part):
    for text in (part, f"kill:2@10, {part} ,nan:1@3"):
        with pytest.raises(ValueError, match="parse_faults") as error:
            parse_faults(text)
        assert says_what_is_wrong(error, part)
        assert "kill:2@10, " not in str(error.value)
    # The control: the same text without the part.
    assert len(parse_faults("kill:2@10,  ,nan:1@3")) == 2


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ("explode:1@2", "kind to be one of kill, vanish, .* got 'explode'"),
        ("kill:1@5-3", "until to be an integer of at least 5; got 3"),
        ("kill:1@2:3.0", "no seconds for 'kill'; got 3.0"),
        ("stall:1@2:1000001", "seconds to be a finite number from 0 to 1e"),
        ("stall:1@2:1.2.3", "float: '1.2.3'"),
        ("kill", "KIND:WORKER@STEP"),
    ],
)
def test_why_a_part_is_bad(part, why):
    with pytest.raises(ValueError, match=why):
        parse_faults(part)


PIECES = [
    *KINDS,
    ":",
    "@",
    "-",
    ",",
    ".",
    " ",
    "0",
    "7",
    "12",
    "\n",
    "x",
    "\N{ARABIC-INDIC DIGIT ONE}",
]


@few
@given(st.text(max_size=30) | st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_a_text_is_faults_or_a_value_error(text):
    message, faults = None, ()
    try:
        faults = parse_faults(text)
    except ValueError as error:
        message = str(error)
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if message is not None:
        assert message.startswith("`parse_faults` ")
        assert len(message.splitlines()) == 1
        assert any(repr(part) in message for part in parts)
    else:
        assert len(faults) == len(parts)
        for fault in faults:
            assert fault.kind in KINDS
            assert 0 <= fault.worker
            assert 0 <= fault.first <= fault.last
            assert 0 <= fault.seconds <= 1e6


@few
@given(
    st.lists(
        st.tuples(
            st.integers(0, 999),
            st.sampled_from([*KINDS]),
            st.integers(0, 10**9),
            st.integers(0, 10**9),
            st.integers(0, 10**7),
        ),
        max_size=5,
    )
)
def test_what_is_written_is_read(rows):
    faults, parts = [], []
    for worker, kind, first, more, tenths in rows:
        stall = kind == "stall"
        faults.append(Fault(worker, kind, first, first + more, tenths / 10 if stall else 0.0))
        suffix = f":{tenths // 10}.{tenths % 10}" if stall else ""
        parts.append(f"{kind}:{worker}@{first}-{first + more}{suffix}")
    assert parse_faults(",".join(parts)) == tuple(faults)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((-1, 5, "kill"), {}, "worker to be an integer of at least 0; got -1"),
        ((True, 5, "kill"), {}, "worker to be an integer of at least 0; got True"),
        ((1, -5, "kill"), {}, "step to be an integer of at least 0; got -5"),
        ((1, False, "kill"), {}, "step to be an integer of at least 0; got False"),
        ((1, 5, "kill"), {"until": 4}, "until to be an integer of at least 5; got 4"),
        ((1, 0, "kill"), {"until": False}, "until to be an integer of at least 0; got False"),
        ((1, 5, ""), {}, "kind to be one of kill, .* got ''"),
        ((1, 5, "Kill"), {}, "kind to be one of kill, .* got 'Kill'"),
        ((1, 5, "kill"), {"seconds": 1.0}, "no seconds for 'kill'; got 1.0"),
        ((1, 5, "kill"), {"seconds": 0}, "no seconds for 'kill'; got 0"),
        ((1, 5, "stall"), {"seconds": -0.1}, "seconds to be a finite number .* got -0.1"),
        ((1, 5, "stall"), {"seconds": 1e7}, "seconds to be a finite number .* got 10000000"),
        ((1, 5, "stall"), {"seconds": float("nan")}, "seconds to be a finite .* got nan"),
        ((1, 5, "stall"), {"seconds": float("inf")}, "seconds to be a finite .* got inf"),
        ((1, 5, "stall"), {"seconds": True}, "seconds to be a finite number .* got True"),
    ],
)
def test_bad_arguments(arguments, options, message):
    with pytest.raises(ValueError, match=f"^`fail_at` needs {message}") as error:
        fail_at(*arguments, **options)
    assert len(str(error.value).splitlines()) == 1
    assert fail_at(1, 5, "stall", until=5, seconds=1).seconds == 1.0


def test_faults_of_a_worker_at_a_step():
    faults = parse_faults("kill:2@10,nan:2@9-12,stall:1@5-8:0.5,cut:2@0")
    when = {(2, step): {"nan"} for step in range(9, 13)}
    when[2, 10] = {"kill", "nan"}
    when[2, 0] = {"cut"}
    when.update({(1, step): {"stall"} for step in range(5, 9)})
    for worker in range(4):
        for step in range(15):
            found = of_worker(faults, worker, step)
            assert set(found) == when.get((worker, step), set())
            assert all(fault in faults and fault.kind == kind for kind, fault in found.items())
    assert of_worker((), 0, 0) == {}
    assert set(of_worker(iter(faults), 2, 10)) == {"kill", "nan"}
