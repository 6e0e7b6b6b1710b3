"""The commands of theory: their tables, their numbers for programs, their pictures and refusals."""

import csv
import io
import json
import subprocess
import sys

import numpy as np
import pytest

from jaxcode.bounds import lower_bound
from jaxcode.cli import main
from jaxcode.codes import cyclic_mds, fractional_repetition
from jaxcode.commands.arguments import CODES, make_code, parse_design, parse_latency

PAUSES = ("--pause", "bimodal:fast=0,slow=5,probability=0.05")


def run(capsys, *arguments):
    code = main([*map(str, arguments)])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def as_json(capsys, *arguments):
    return json.loads(run(capsys, *arguments, "--json"))


def facts(document):
    return {row["property"]: row["value"] for row in document["code"]}


def test_describe_tells_what_the_library_says(capsys):
    document = as_json(capsys, "describe", "fractional_repetition", 8, 2, 2, "--shape", 784, 1024)
    code = fractional_repetition(8, 2, num_fragments=2)
    found = facts(document)
    assert found["copies of the batch computed"] == 4
    assert found["worst condition"] == pytest.approx(code.worst_condition)
    assert found["worst loss in float32"] == pytest.approx(code.float32_error)
    loads = {row["scheme"]: row["numbers/worker"] for row in document["loads"]}
    assert loads["dense"] == 784 * 1024 / 2
    assert loads["factors"] == 32 * (784 + 1024) / 2
    assert loads["normal form"] == lower_bound(code, (784, 1024), 32) == loads["lower bound"]
    missing = {row["missing"]: row for row in document["stragglers"]}
    assert missing[2]["decodes exactly"] == 1
    assert missing[3]["mean error"] > 0
    assert "optimal at every rank" in document["loads notes"][0]


@pytest.mark.parametrize("name", CODES)
def test_every_code_is_described(capsys, name):
    second = {"uncoded": 0, "graph_code": 3}.get(name, 2)
    speeds = ("--speeds", *[1, 2] * 3) if name == "heterogeneous" else ()
    out = run(capsys, "describe", name, 6, second, *speeds)
    assert name in out
    assert "optimal" in out or "no bound applies" in out


def test_a_lossy_code_is_described_with_its_warning(capsys):
    document = as_json(capsys, "describe", "cyclic_mds", 64, 7)
    assert any("may lose 8e-02" in note for note in document["loads notes"])
    assert facts(document)["worst loss in float32"] > 1e-2


def test_csv_is_one_table_that_programs_can_read(capsys):
    out = run(capsys, "describe", "cyclic_mds", 8, 2, "--csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["scheme"] for row in rows] == ["dense", "ye abbe", "power sgd", "lower bound"]
    assert float(rows[0]["numbers/worker"]) == 784 * 1024 + 1024 * 1024 + 10240 + 2 * 1024 + 10


def test_plan_says_not_to_code_where_coding_does_not_pay(capsys):
    mild = ("--slowdown", "bimodal:1,1.3,0.02", "--exact")
    document = as_json(capsys, "plan", "--workers", 16, *mild, "--product-share", 0)
    assert document["plan notes"][0] == "verdict: low rank without redundancy"
    assert {row["decode"] for row in document["plan"]} == {0}
    document = as_json(capsys, "plan", "--workers", 16, *mild)  # 0.85 s of products for 0.06 s
    assert document["plan notes"][0] == "verdict: uncoded"
    decode = {row["design"]: row["decode"] for row in document["plan"]}
    assert (decode["uncoded, dense"], decode["uncoded, factors"]) == (0, pytest.approx(0.85, 0.01))
    assert document["redundancy breaks even"][0]["copies"] == 1
    document = as_json(capsys, "plan", "--workers", 16, "--exact", *PAUSES)
    assert document["plan notes"][0] == "verdict: redundancy"
    chosen = [row for row in document["plan"] if row["chosen"]]
    assert len(chosen) == 1
    assert chosen[0]["speed"] > 2
    assert {row["leaf"]: row["sent as"] for row in document["leaves"]}["layer1/bias"] == "dense"
    text = run(capsys, "plan", "--workers", 16, "--exact", *PAUSES)
    assert "break-even bandwidth" in text
    assert "break-even redundancy" in text


def test_plan_of_a_file_of_parameters(capsys, tmp_path):
    np.savez(tmp_path / "model.npz", w=np.zeros((300, 200), np.float16), b=np.zeros(200))
    document = as_json(capsys, "plan", "--params", tmp_path / "model.npz", *PAUSES)
    assert {row["leaf"] for row in document["leaves"]} == {"w", "b"}


def test_describe_counts_bytes_of_the_files_own_numbers(capsys, tmp_path):
    path = tmp_path / "half.npz"
    np.savez(path, w=np.zeros((300, 200), np.float16))
    loads = as_json(capsys, "describe", "uncoded", 4, "--params", path)["loads"]
    sent = {row["scheme"]: (row["numbers/worker"], row["bytes/worker"]) for row in loads}
    assert sent["dense"] == (60_000, 120_000)
    assert sent["lower bound"] == (32 * 468, 2 * 32 * 468)
    assert {row["scheme"]: row["optimal leaves"] for row in loads}["power sgd"] == "lossy"


def test_a_file_without_parameters_is_one_line(capsys, tmp_path):
    for name, arrays in {"none": {}, "empty": {"w": np.zeros((0, 3))}}.items():
        path = tmp_path / f"{name}.npz"
        np.savez(path, **arrays)
        assert main(["describe", "uncoded", "4", "--params", str(path)]) == 2
        err = capsys.readouterr().err
        assert "needs a file with parameters" in err
        assert err.count("\n") == 1


def test_simulate_is_the_library(capsys):
    document = as_json(
        capsys, "simulate", "uncoded", "fractional_repetition:1/factors", "uncoded@7", *PAUSES
    )
    plain, coded, dropped = document["simulation"]
    assert plain["seconds"] > 1.5 * coded["seconds"]
    assert plain["decode"] == 0 < 0.8 < coded["decode"] < 2.56 / 3
    assert (plain["error"], coded["error"], dropped["error"]) == (0, 0, 0.125)
    assert plain["bytes/worker"] == 4 * (784 * 1024 + 1024 * 1024 + 10240 + 2 * 1024 + 10)
    assert coded["p50"] <= coded["p90"] <= coded["p99"]
    again = as_json(
        capsys, "simulate", "uncoded", "fractional_repetition:1/factors", "uncoded@7", *PAUSES
    )
    assert again == document


def test_the_share_of_products_is_an_option(capsys):
    arguments = ("simulate", "uncoded/factors", "--shape", 300, 200, "--examples", 8)
    for share in (0, 0.25, 0.5):
        (row,) = as_json(capsys, *arguments, "--product-share", share)["simulation"]
        assert row["decode"] == pytest.approx(share * 8 * 0.01)
        assert row["compute"] == pytest.approx((1 - share) * 0.01)


def test_steps_that_never_end_are_json_too(capsys):
    pause = ("--pause", "bimodal:fast=0,slow=inf,probability=0.5")
    document = as_json(capsys, "simulate", "uncoded", *pause)
    assert document["simulation"][0]["seconds"] == "inf"


@pytest.mark.parametrize(
    "arguments",
    [
        ("describe", "polynomial", 8, 2, 2),
        ("describe", "graph_code", 12, 3),
        ("plan", *PAUSES),
        ("simulate", "uncoded", "cyclic_mds:1", *PAUSES),
        ("plot", "rank", "--code", "cyclic_mds"),
        ("plot", "rank", "--shape", 40, 30),
        ("plot", "tolerance", "--rank", 3),
        ("plot", "tolerance", "--workers", 30),
        ("plot", "trace", "{trace}"),
    ],
)
def test_pictures(capsys, tmp_path, arguments):
    trace = tmp_path / "seconds.csv"
    trace.write_text("a,b,c\n1,2,inf\n3,1,1\n")
    picture = tmp_path / "picture.png"
    arguments = [str(x).format(trace=trace) for x in arguments]
    assert main([*arguments, "--out", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "wrote" in capsys.readouterr().err


def test_numbers_of_the_figures(capsys, tmp_path):
    rows = as_json(capsys, "plot", "rank", "--shape", 40, 30)["rank"]
    code = fractional_repetition(8, 1)
    assert len(rows) == 30
    assert rows[6] == {
        "rank": 7,
        "ye_abbe": 1200,
        "factors": 490,
        "normal_form": 441,
        "lower bound": lower_bound(code, (40, 30), 7),
    }
    cells = as_json(capsys, "plot", "tolerance", "--workers", 4, "--shape", 40, 30)["tolerance"]
    assert {(c["s"], c["d"]): c["numbers/worker"] for c in cells}[1, 4] == 400
    trace = tmp_path / "t.npz"
    np.savez(trace, seconds=[[1.0, 2.0]])
    assert as_json(capsys, "plot", "trace", trace)["trace"][1]["seconds"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("describe", "required: CODE, n"),
        ("describe nonsense 8", "invalid choice: 'nonsense'"),
        ("describe uncoded 0", "whole number of at least 1; got '0'"),
        ("describe uncoded x", "whole number of at least 1; got 'x'"),
        ("describe uncoded 8 1", "`uncoded` needs 0 stragglers"),
        ("describe cyclic_mds 8 1 2", "`cyclic_mds` needs one fragment; got 2"),
        ("describe polynomial 20 4 4", "may lose 1e-01 of the gradient"),
        ("describe fractional_repetition 8 8", "num_stragglers to be an integer from 0 to 7"),
        ("describe heterogeneous 3 1", "needs --speeds, one for each of 3 workers"),
        ("describe heterogeneous 2 1 --speeds 1 -1", "number above 0; got '-1'"),
        ("describe graph_code 30 7", "the valid ones are 2, 3, 4, 5, 6"),
        ("describe uncoded 8 --layers 5", "--layers needs two widths or more"),
        ("describe uncoded 8 --layers 5 5 --shape 5 5", "not both"),
        ("describe uncoded 8 --params none.npz", "it does not exist"),
        ("describe uncoded 8 --params none.txt", "needs an .npz file"),
        ("describe uncoded 8 --json --csv", "not both"),
        ("describe uncoded 8 --out picture.txt", "needs a name in .png, .pdf, .svg"),
        ("describe uncoded 8 --out none/picture.png", "'none' is not one"),
        ("plan --pause nonsense", "Models: shifted_exponential"),
        ("plan --pause bimodal", "`bimodal` needs fast, slow, probability"),
        ("plan --pause bimodal:0,5,x", "needs a number for probability; got 'x'"),
        ("plan --pause bimodal:0,5,2", "probability"),
        ("plan --pause bimodal:0,5,nan", "probability"),
        ("plan --pause bimodal:slow=1,slow=2", "takes slow once"),
        ("plan --pause bimodal:0,5,0.1,7", "takes probability once"),
        ("plan --pause trace:none.csv", "it does not exist"),
        ("plan --probability 2", "probability"),
        ("plan --stragglers 8", "num_stragglers to be an integer from 0 to 7"),
        ("plan --bandwidth 0", "number above 0; got '0'"),
        ("plan --bandwidth nan", "number above 0; got 'nan'"),
        ("plan --product-share 1", "number of at least 0 and below 1; got '1'"),
        ("plan --seconds-per-example 1e300", "seconds_per_example to be a finite number from 0"),
        ("simulate uncoded --bandwidth 1e300", "bandwidth to be a finite number from 0 to 1e+30"),
        ("simulate", "required: DESIGN"),
        ("simulate nonsense", "a design is CODE"),
        ("simulate uncoded/nonsense", "Methods: dense, factors"),
        ("simulate uncoded@9", "wait_for to be an integer from 1 to 8; got 9"),
        ("simulate uncoded@", "a design is CODE"),
        ("simulate fractional_repetition:x", "a design is CODE"),
        ("simulate fractional_repetition:1:1:1", "a design is CODE"),
        ("simulate cyclic_mds:2/factors", "needs a block code"),
        ("simulate uncoded --steps 0", "of at least 1; got '0'"),
        ("simulate uncoded --unknown 0", "unrecognized arguments"),
        ("plot rank", "give --out FILE.png"),
        ("plot trace --out x.png", "needs a FILE of seconds"),
        ("plot rank file.csv --out x.png", "takes no FILE"),
        ("plot trace none.csv --csv", "it does not exist"),
        ("plot nonsense", "invalid choice"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(
    capsys, monkeypatch, tmp_path, arguments, message
):
    monkeypatch.chdir(tmp_path)
    assert main(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert err.count("\n") == 1
    assert not out
    assert not list(tmp_path.iterdir())


def test_theory_runs_without_jax():
    program = (
        "import sys; from jaxcode.cli import main; "
        "assert main(['describe', 'cyclic_mds', '8', '2', '--json']) == 0; "
        "assert main(['plan', '--workers', '4', '--json']) == 0; "
        "assert main(['simulate', 'uncoded', '--steps', '10', '--json']) == 0; "
        "assert not {'jax', 'flax', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


def test_parts_of_the_language():
    assert repr(make_code("cyclic_mds", 8, 2)) == repr(cyclic_mds(8, 2))
    assert parse_design("fractional_repetition:1", 8).code.num_stragglers == 1
    assert parse_design("uncoded/power-sgd", 8).method == "power_sgd"
    drawn = parse_latency("shifted_exponential:shift=2,rate=1")(np.random.default_rng(0), (3, 4))
    assert (drawn > 2).all()
