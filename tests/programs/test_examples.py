"""The example programs run, and do what they say."""

from __future__ import annotations

from examples.int8_gather import Outcome, train


def int8_and_plain() -> tuple[Outcome, Outcome]:
    return train(int8=True, steps=6), train(int8=False, steps=6)


def test_int8_gathers_send_less_and_learn_as_much(world) -> None:
    for int8, plain in world(2).run(int8_and_plain):
        assert int8.bytes_per_step < 0.3 * plain.bytes_per_step
        assert abs(int8.held_out - plain.held_out) < 0.02
        assert plain.held_out < 5  # from 5.5
