"""What recurrent layers keep of a request: after some nodes the state into which their paths were folded.

The state after a node is a pure function of the inputs on its path, taken one token at a time. So states are a bounded
cache over these inputs, which slots keep as they keep keys and values: with fewer states more inputs are read again,
and no bit changes.

Shapes: T rows, W inputs that a step reads, N numbers of an input, M of an output.
"""
from __future__ import annotations

from typing import Callable, Container, NamedTuple, Protocol, Sequence

import numpy as np
import torch
from torch import Tensor

from model.devices import upload

MAX_STATES = 16  # of a layer and request: that of the text, and those of the newest guesses
ROWS_AT_ONCE = 64  # that are read again at once, to bound memory


class MemoryForm(NamedTuple):
    """The numbers that a recurrent layer keeps."""

    input_width: int  # of each node
    state_shape: tuple[int, ...] = ()  # of the state after a path; empty: outputs follow from the last inputs alone


class Recurrence(Protocol):
    """A layer whose outputs depend on the path of a row, in the order of its tokens."""

    num_taps: int  # the last inputs of a path that a step reads, its own included

    def steps(self, inputs_TWN: Tensor) -> Sequence[Tensor]:
        """Return what rows with these last inputs do to a state, in tensors with a row for each; before a text inputs
        are zeros. A layer without states returns its outputs `[T, M]` alone."""

    def advance(self, steps: Sequence[Tensor], state: Tensor) -> Tensor:
        """Continue a state by steps that follow one another; return the outputs `[T, M]`."""


class Inputs(NamedTuple):
    """The inputs of one recurrent layer by slot, and what it computes with them."""

    input_SN: Tensor
    first_slot: int
    recurrence: Recurrence

    def steps(self, slots_TW: np.ndarray) -> Sequence[Tensor]:
        """Return the steps of rows with their last inputs in these slots; -1 stands for zeros."""
        device = self.input_SN.device
        index_TW = upload(torch.from_numpy(slots_TW - self.first_slot), device)
        is_before_text = upload(torch.from_numpy(slots_TW < 0), device)
        input_TWN = self.input_SN[index_TW.clamp(min=0)]
        return self.recurrence.steps(input_TWN.masked_fill(is_before_text[..., None], 0))

    def follow(self, path_slots: np.ndarray, state: Tensor) -> None:
        """Continue a state along a path, given with the inputs that its first step reads before it."""
        num_taps = self.recurrence.num_taps
        num_steps = len(path_slots) + 1 - num_taps
        for begin in range(0, num_steps, ROWS_AT_ONCE):
            numbers = np.arange(begin, min(begin + ROWS_AT_ONCE, num_steps))
            steps = self.steps(path_slots[numbers[:, None] + np.arange(num_taps)])
            self.recurrence.advance(steps, state)


class States:
    """The states of one layer for one request, of the type of `like`: after its text, and after the newest guesses."""

    def __init__(self, memory_form: MemoryForm, like: Tensor) -> None:
        self.memory_form, self.like, self.max_states = memory_form, like, MAX_STATES
        self.clear()

    def clear(self) -> None:
        """Return to the beginning of a text."""
        self.length = 0  # tokens of the text that `text` follows; later ones may have settled
        self.text = self.like.new_zeros(self.memory_form.state_shape)
        self._after: dict[int, Tensor] = {}  # by node, the least recently used first

    def after(self, node: int) -> Tensor | None:
        """Return the state after a guess, if it is kept."""
        state = self._after.pop(node, None)
        if state is not None:
            self._after[node] = state
        return state

    def before(self, nodes: Sequence[int], text_length: int, slots_from: Callable[[int], np.ndarray],
               inputs: Inputs) -> Tensor:
        """Return a copy of the state after a path, continued from the nearest one that is kept.

        The path is a text of this length, and these nodes; `slots_from(position)` are those of its inputs.
        """
        nearest_state, length = self.text, self.length
        for depth in range(len(nodes), 0, -1):
            kept_state = self.after(nodes[depth - 1])
            if kept_state is not None:
                nearest_state, length = kept_state, text_length + depth
                break

        state = nearest_state.clone()
        inputs.follow(slots_from(length + 1 - inputs.recurrence.num_taps), state)
        return state

    def keep(self, node: int, state: Tensor) -> None:
        """Keep the state after a guess, instead of the least recently used one if there is no room."""
        self._after[node] = state
        while len(self._after) >= self.max_states:
            del self._after[next(iter(self._after))]

    def retain(self, nodes: Container[int]) -> None:
        """Free the states after other nodes."""
        self._after = {node: state for node, state in self._after.items() if node in nodes}

    def settle(self, node: int, length: int) -> None:
        """Take the state after a node as that of the text, which now ends there after `length` tokens."""
        state = self._after.pop(node, None)
        if state is not None:
            self.text, self.length = state, length

    def truncate(self, length: int) -> None:
        """Forget states after more than `length` tokens."""
        if self.length > length:
            self.clear()

    def copy(self, source: States, length: int) -> None:
        """Take the state of another request's text, if that is no longer than `length` tokens."""
        self.clear()
        if source.length <= length:
            self.text, self.length = source.text.clone(), source.length

    @property
    def bytes(self) -> int:
        """The memory of the states in bytes."""
        num_states = 1 + len(self._after)
        return num_states * self.text.numel() * self.text.element_size()
