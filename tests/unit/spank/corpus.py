"""A few thousand values from seeds and mutations: volume, where hypothesis gives depth.

Every option has good seeds at its borders; each value is a seed after none to three random edits.
The generator is seeded, so a failure can be repeated.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

SEEDS: dict[str, tuple[str, ...]] = {
    "model": ("vit-large", "org/model@main", "m" * 96, "a@" + "r" * 64, "Llama-3.1:8B+x@v1.0"),
    "dataset": ("card.yaml", "/data/im@ge/c=1,2%#~.yaml", "d" * 255, "../x"),
    "samples": ("1", "50000", "1000000000000"),
    "epochs": ("3", "0.5", "0.0001", "1000000", "2.50"),
    "steps": ("1", "1000000000"),
    "batch": ("256", "256-1024", "1-16777216", "7-7"),
    "gpus": (
        "auto",
        "requested",
        "1,2,4-8",
        "4096",
        "1-4096",
        "8,1,3-5,5-6",
        "2,4,6,8,10,12,14,16",
    ),
    "input": ("224", "3x224x224", "1x2x3x4", "10000000"),
    "frozen": ("none", "backbone", "12", "100000"),
    "precision": ("fp32", "bf16", "fp8"),
    "grad-checkpointing": ("yes", "no"),
    "class": ("guaranteed", "preemptible"),
    "deadline": (
        "2030-05-01",
        "2030-05-01T08:00",
        "2096-02-29T23:59:59Z",
        "2199-12-31T23:59:59+14:00",
        "2027-01-01T00:00-05:30",
        "now+1:00",
        "now+2:00:00",
        "now+1-12",
        "now+90minutes",
        "now+1week",
        "now+3650-00",
    ),
    "merge": ("no", "account", "any"),
    "switch": ("yes", "no"),
    "quality": ("top1>=0.81", "loss<=-0.350000", "m@5/x>=1000000000", "a<=0", "a>=-0.0"),
    "max-pause": ("90", "10:00", "1:30:00", "1-12", "29-23:59", "2-01:02:03", "0:01"),
    "max-gpu-hours": ("100", "0.25", "10000000", "1.5000"),
}
_ALPHABET = "0123456789abzAZ.,:-+=<>@/x_ T~'\"\\\n\t%#é"


def _edited(rng: random.Random, text: str) -> str:
    at = rng.randrange(len(text) + 1)
    kind = rng.randrange(5)
    if kind == 0:
        return text[:at] + rng.choice(_ALPHABET) + text[at:]
    if kind == 1:
        return text[:at] + text[at + 1 :]
    if kind == 2:
        return text[:at] + rng.choice("0123456789") + text[at + 1 :]
    if kind == 3:
        return text + rng.choice(("", ",", "-", ":", ".")) + text[at:]
    return text[:at] + text[at : at + 2] * 2 + text[at + 2 :]


def corpus(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """``count`` pairs of an option's name and a value."""
    rng = random.Random(seed)
    names = sorted(SEEDS)
    for _ in range(count):
        name = rng.choice(names)
        text = rng.choice(SEEDS[name])
        for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
            text = _edited(rng, text)
        yield name, text.encode()
