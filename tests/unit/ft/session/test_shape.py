"""What is refused as a state, and the fix that each refusal names."""

from __future__ import annotations

import collections
import enum
from pathlib import Path
from typing import Any

import pytest

from slurm_ft.session import shape


class Holder:
    """What every torch object with a state looks like."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Linear(Holder):
    def forward(self) -> None:
        pass

    def zero_grad(self) -> None:
        pass


class Adam(Holder):
    def zero_grad(self) -> None:
        pass

    def step(self) -> None:
        pass


class StepLR(Holder):
    def get_last_lr(self) -> None:
        pass

    def step(self) -> None:
        pass


class OneWay:
    def state_dict(self) -> dict[str, Any]:
        return {}


class Trainer:
    pass


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (
            Linear(),
            'state= is a Linear and no mapping of names to what is saved: write state={"mod',
        ),
        (Adam(), 'state={"optimizer": optimizer}'),
        ([Linear(), Adam()], 'write state={"model": model, "optimizer": optimizer}'),
        ((Linear(), Adam(), StepLR()), '"scheduler": scheduler}'),
        ([Linear(), Linear()], 'state={"model0": model0, "model1": model1}'),
        (Trainer(), "state= is a Trainer and no mapping"),
        (3, "state= is an int and no mapping"),
        ({1: Linear()}, "key 1"),
        ({"model": OneWay()}, 'state["model"]: an OneWay has state_dict and no load_state_dict'),
        ({"model": Linear().state_dict}, "state_dict is given and not called"),
        ({"model": Linear}, "Linear is a type"),
        ({"all": {"model": Linear()}}, "state[\"all\"]['model']: a Linear gives its state itself"),
        ({"all": [Linear()]}, 'state["all"][0]: a Linear gives'),
        ({"trainer": Trainer()}, 'state["trainer"]: a Trainer is neither'),
        ({"data": (n for n in range(3))}, "a generator is neither"),
        ({"f": lambda: 3}, "is a function and no state"),
        ({"n": {"deep": {"er": [1, {"x": Trainer()}]}}}, "['deep']['er'][1]['x']: a Trainer"),
    ],
)
def test_what_cannot_be_saved_and_restored_is_told_with_the_fix(state: object, words: str):
    assert words in shape.fault(state)


def test_what_can_be_is_accepted():
    numpy = pytest.importorskip("numpy")
    state = {
        "model": Linear(),
        "optimizer": Adam(),
        "epoch": 3,
        "loss": 0.5,
        "name": "x",
        "best": None,
        "history": [1.0, [2.0, "a"], {"k": (1, b"x")}],
        "recent": collections.deque([1]),
        "counts": collections.Counter("aab"),
        "where": Path("/x"),
        "colour": Colour.RED,
        "array": numpy.zeros(3),
        "number": numpy.float32(1.0),
        "random": numpy.random.RandomState(0).get_state(),
        "seen": {1, 2},
        "numbers": {1: 2},
        "nothing": {},
    }
    assert shape.fault(state) == ""
    assert shape.fault(collections.OrderedDict(state)) == ""
