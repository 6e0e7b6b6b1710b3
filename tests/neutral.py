"""Conditions under which nothing is late, cut off or slow to decode: what tests start from."""

import math

NEUTRAL = {
    "positions": 1, "master_bandwidth": math.inf, "decode_rate": math.inf, "slowdown": None,
    "pause": None, "network": None, "deadline": None, "product_share": 1 / 3,
}  # fmt: skip
