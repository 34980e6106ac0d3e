"""State trees survive the way through JSON and tensors bit by bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bamboo_ds.errors import ProtocolError, UnsupportedError
from bamboo_ds.state import join, split

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.integers() | st.text(), inner),
)


@given(trees)
def test_round_trip(tree: Any) -> None:
    text, tensors = split(tree)
    again = join(text, tensors)
    assert again == tree
    assert repr(again) == repr(tree)


def test_tensors_keep_their_bits_and_places() -> None:
    tree = {"a": [torch.tensor([1.5, math.nan])], 3: (torch.tensor(True), None)}
    text, tensors = split(tree)
    again = join(text, tensors)
    assert torch.equal(again["a"][0].view(torch.int32), tree["a"][0].view(torch.int32))  # type: ignore[index]
    assert again[3][0].item() is True and again[3][1] is None


def test_other_types_are_named() -> None:
    with pytest.raises(UnsupportedError, match=r"state\['groups'\]\[0\] is a set"):
        split({"groups": [{1, 2}]})


def test_other_messages_are_refused() -> None:
    with pytest.raises(ProtocolError):
        join('["set", [1]]', [])
