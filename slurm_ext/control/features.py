"""Slurm's feature expressions: which nodes a job's ``--constraint`` admits.

Understood are names joined by ``&`` (or ``,``) and ``|`` with round brackets. Counts (``a*2``) and
alternatives that must hold for all nodes alike (``[a|b]``) tie the choice of nodes to the job's
size, so a job that uses them is never resized; its nodes are then taken as those that have any of
the named features, which errs on the side of too many. Nothing here guesses at other signs: an
expression that cannot be read admits no statement, and the job is treated like one with a count.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

_TOKEN = re.compile(r"\s*([A-Za-z0-9_.:+/-]+|[&|,()])")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.:+/-]*")
_TIED = re.compile(r"[\[\]*]")

Test = Callable[[frozenset[str]], bool]


@dataclass(frozen=True, slots=True)
class FeatureRule:
    """Which nodes are admitted. ``tied`` tells that the size of the job matters to it."""

    admits: Test
    tied: bool = False


class _Unreadable(Exception):
    """The expression uses something that is not understood."""


def parse_features(expression: str) -> FeatureRule:
    """The rule that an expression states; the empty one admits every node."""
    text = expression.strip()
    if not text:
        return FeatureRule(lambda features: True)
    if _TIED.search(text) is None:
        try:
            return FeatureRule(_Parser(text).whole())
        except _Unreadable:
            pass
    names = frozenset(_NAME.findall(text))
    return FeatureRule(lambda features: not names.isdisjoint(features), tied=True)


class _Parser:
    """Recursive descent. Slurm evaluates from left to right without precedence inside a level."""

    def __init__(self, text: str) -> None:
        self._tokens: list[str] = []
        at = 0
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise _Unreadable
            self._tokens.append(match.group(1))
            at = match.end()
        self._at = 0

    def whole(self) -> Test:
        test = self._chain()
        if self._at != len(self._tokens):
            raise _Unreadable
        return test

    def _chain(self) -> Test:
        test = self._term()
        while self._at < len(self._tokens) and self._tokens[self._at] in "&|,":
            sign = self._tokens[self._at]
            self._at += 1
            test = _join(test, self._term(), any_of=sign == "|")
        return test

    def _term(self) -> Test:
        if self._at >= len(self._tokens):
            raise _Unreadable
        token = self._tokens[self._at]
        self._at += 1
        if token == "(":
            test = self._chain()
            if self._at >= len(self._tokens) or self._tokens[self._at] != ")":
                raise _Unreadable
            self._at += 1
            return test
        if token in "&|,)":
            raise _Unreadable
        return lambda features: token in features


def _join(left: Test, right: Test, *, any_of: bool) -> Test:
    if any_of:
        return lambda features: left(features) or right(features)
    return lambda features: left(features) and right(features)
