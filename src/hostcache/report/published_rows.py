"""What the published benchmark's tables say beyond the fleet's figures that are handed in: its no-overhead ladders, its
A/B/A passes, and single figures of cells. Numbers only, each from section 7 of the report on the published fleet."""

from __future__ import annotations

from typing import Final

NO_OVERHEAD: Final = (
    # corpus, prompt tokens, TTFT off s, TTFT on s, prefill off tok/s, prefill on tok/s
    ("prose", 19_734, 3.61, 4.50, 5468, 4593), ("prose", 69_343, 13.02, 17.01, 5325, 4856),
    ("prose", 134_578, 35.25, 37.27, 3818, 4459), ("prose", 650_943, 173.03, 172.51, 3762, 3715),
    ("code", 14_725, 2.75, 3.02, 5362, 5237), ("code", 65_775, 11.71, 11.19, 5619, 5501),
    ("code", 133_819, 34.56, 28.03, 3872, 5045), ("code", 510_215, 128.97, 130.89, 3956, 4044),
)
"""Single samples from fresh launches."""
SIX_STREAMS: Final = {"prose": (105.0, 110.0), "code": (77.0, 129.0)}
"""Aggregate decode tok/s at six streams, off and on."""
PASSES: Final = (
    # pass, prompt tokens, prefill off tok/s, prefill on tok/s, TTFT off s, TTFT on s
    (2, 18_776, 3767, 3459, 4.98, 4.91), (2, 69_469, 5224, 5241, 13.30, 15.49), (2, 159_764, 5070, 5000, 31.51, 31.84),
    (2, 676_809, 3747, 3949, 180.63, 138.15), (3, 16_592, 3502, 3639, 4.74, 5.15),
    (3, 91_383, 5325, 5242, 17.16, 13.93), (3, 167_018, 5257, 5057, 31.77, 33.34),
    (3, 650_439, 3866, 3841, 168.23, 175.82),
)
PASS_DECODE: Final = {2: (45.6, 70.8), 3: (63.6, 68.9)}
"""Single-stream decode tok/s of the passes, off and on, mean of three samples."""
TURN_LATENCY_P95_S: Final = {(32, "off"): 173.0, (32, "on"): 38.0, (48, "off"): 250.0, (48, "on"): 69.0}
"""By (agents, arm), backoff included."""
CELLS: Final = (
    # cell, question, published result
    ("B1", "Does the tier cost anything when nothing is evicted?", "prefill 0.99× on average, within ±5 % per rung"),
    ("Pilot", "Many small sessions over few bank entries", "485 vs 174 revisits; TTFT p50 0.51 vs 2.28 s; "
     "decode 19.7 vs 7.2 tok/s; 0 errors"),
    ("B2", "Sustained revisits at growing working sets", "5–64× the revisits beyond the pool; neutral where it fits "
     "(R2)"),
    ("B3", "Does it come back clean after pressure stops?", "every primed session restored, TTFT 0.25–0.6 s; "
     "never-primed ones cold, as they must; 0 errors"),
    ("B4", "How far can one coordinator be pushed?", "6 users at 300k: TTFT p95 1.6 s, 12.5 tok/s per stream, "
     "0 errors"),
    ("B5", "Coding agents, a ramp", "3.1× the turns at 6.1× lower average time at 32 agents"),
    ("Large rung", "The largest single conversation", "270.9 s cold, 1.09 s restored (249×), 100 % hit"),
    ("Equivalence", "Is a restored conversation the retained one?", "3 of 3 identical"),
)
PILOT: Final = {"revisits": (174, 485), "ttft_p50_s": (2.28, 0.51), "decode_tok_s": (7.2, 19.7)}
"""Off and on, windows of 15 minutes each."""
