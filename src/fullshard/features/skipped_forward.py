"""A forward that computes nothing: a rank takes part in a module's collectives with gradients of zero.

The rank runs the hooks of all sharded modules in the module, as a forward would, with a number that is zero, the token,
in the place of data. What a module computes is replaced by an autograd function of the token and of the module's
parameters, which gives the parameters gradients of zero in backward:

    computes   x --- layer 0 --- layer 1 --- y --- h + y
    skips      0 --- layer 0 --- layer 1 --- 0 --- h         the token has been joined with h

So forward and backward are ordinary ones to the engine and to autograd: gathers, prefetches, releases and reductions come
in the same order and at the same places as on ranks that compute, whatever the options. This is what must be known of
the computation:

    which sharded modules are used within which, in which order
    whether a module's output is an output of a module within it: backward then reaches the inner one first
    whether an output is used at all, and which parameters get gradients

The rank knows it if it has computed the module before (`observed_use`). If not, it takes modules in the order of their
registration, each once, and all parameters. Parameters of a module itself that are registered after the modules
within it are taken to be used after them, and others before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from fullshard import torch_border
from fullshard.engine import hooks
from fullshard.engine.state import FSDPState, state_of
from fullshard.engine.tensor_trees import map_tensors, tensors_in
from fullshard.errors import ConfigurationError, UnsupportedError
from fullshard.storage.param import FSDPParam

Prepare = Callable[[nn.Module], None]
"""Function that an API calls for a sharded module before its forward."""


@torch_border.opaque_to_compiler
def skip_forward(
    module: nn.Module, output: Any, *, inputs_require_grad: bool, prepare: Prepare
) -> Any:
    """Take part in the collectives of a sharded module's forward and backward without computing; see `FSDPModule.skip_forward`."""
    if torch_border.innermost_transform() is not None:
        raise UnsupportedError(
            "skip_forward cannot be called within a transform of torch.func. Call the module with other inputs instead."
        )
    state = state_of(module)
    assert state is not None, "a method of sharded modules"
    found = {id(tensor): tensor for tensor in tensors_in(output)}
    tensors = [each for each in found.values() if each.is_floating_point() or each.is_complex()]
    if output is not None and not tensors:
        raise ConfigurationError(
            "skip_forward returns its argument so that backward passes through it, so the argument must contain a "
            f"floating-point tensor; got {type(output).__name__}. Pass the tensor that goes on in forward, or nothing."
        )
    token = torch.zeros((), device=state.device)
    if inputs_require_grad and torch.is_grad_enabled():
        token.requires_grad_()
    token = _Skipping(prepare).run(module, token)
    if output is None:
        return token
    if not token.requires_grad:
        return output
    joined = dict(zip(map(id, tensors), cast(Any, _Join).apply(token, *tensors), strict=True))
    return map_tensors(lambda tensor: joined.get(id(tensor), tensor), output)


class _Skipping:
    """One skipped forward."""

    def __init__(self, prepare: Prepare) -> None:
        self._prepare = prepare

    def run(self, module: nn.Module, token: Tensor) -> Tensor:
        """Run the hooks of a sharded module and of those within it; return the token in the place of its output."""
        state = state_of(module)
        assert state is not None, "only sharded modules have hooks"
        if state.summoned:
            return self._compute(state, module, token)  # its forward gathers nothing, either
        # Now: the hooks note what is used within this forward.
        inner = None if len(state.modules) > 1 else state.use.inner
        self._prepare(module)
        (token,), _ = hooks.pre_forward(state, module, (token,), {})
        output = None
        try:
            output = self._compute(state, module, token, inner)
        finally:
            output = hooks.post_forward(state, module, (token,), output)
        result: Tensor = output
        return result

    def _compute(
        self,
        state: FSDPState,
        module: nn.Module,
        token: Tensor,
        inner: Sequence[FSDPState] | None = None,
    ) -> Tensor:
        """Do to the token what the module does to its input, as far as collectives depend on it."""
        parts = _Parts(state, module)
        modules = parts.inner if inner is None else list(_modules_of(inner))
        if not modules:
            return _with_zero_gradients(token, [*parts.before, *parts.after], state)
        use, known = state.use, _is_known(state)
        before, after = parts.before, parts.after
        if known and use.returns_inner_output:
            before, after = [*before, *after], []
        if before:
            token = _with_zero_gradients(token, before, state)
        for each in modules:
            output = self.run(each, token)
            if not (known and _is_dead_end(each, use.reached_at)):
                token = output
        if after or (known and not use.returns_inner_output):
            token = _with_zero_gradients(token, after, state)
        return token


class _Parts:
    """The parts below a sharded module, in the order of registration."""

    def __init__(self, state: FSDPState, module: nn.Module) -> None:
        self.inner: list[nn.Module] = []
        """The uppermost sharded modules below."""
        self.before: list[FSDPParam] = []
        """Parameters of the module itself that are registered before those modules."""
        self.after: list[FSDPParam] = []
        """... and all others."""
        before, own = {module}, {module}
        for each in self._walk(state, module, set()):
            own.add(each)
            if not self.inner:
                before.add(each)
        for param in (param for group in state.groups for param in group.params):
            owners = {owner.module for owner in param.owners}
            if owners & before:
                self.before.append(param)
            elif owners & own:
                self.after.append(param)

    def _walk(
        self, state: FSDPState, module: nn.Module, seen: set[nn.Module]
    ) -> Iterator[nn.Module]:
        for child in module.children():
            if child in seen:
                continue
            seen.add(child)
            if state_of(child) not in (None, state):
                self.inner.append(child)
            else:
                yield child
                yield from self._walk(state, child, seen)


def _modules_of(states: Sequence[FSDPState]) -> Iterator[nn.Module]:
    """Yield a module for each use of a state: of one that several modules share, a module after the other."""
    times_used: dict[FSDPState, int] = {}
    for state in states:
        number = times_used[state] = times_used.get(state, -1) + 1
        yield state.modules[number % len(state.modules)]


def _is_known(state: FSDPState) -> bool:
    """Whether a backward has shown how this state is used, with as many trainable parameters as now."""
    trainable = sum(param.trainable for group in state.groups for param in group.params)
    return state.use.reached_at > 0 and state.use.num_trainable == trainable


def _is_dead_end(module: nn.Module, reached_at: int) -> bool:
    """Whether backward did not reach a module's output when it reached the module around it, at tick ``reached_at``."""
    state = state_of(module)
    return state is not None and state.use.had_backward and state.use.reached_at < reached_at


def _with_zero_gradients(token: Tensor, params: Sequence[FSDPParam], state: FSDPState) -> Tensor:
    """Return a new token, whose backward gives the parameters gradients of zero."""
    unused = state.use.unused if _is_known(state) else ()
    trained = [param.unsharded_param for param in params if param.trainable and param not in unused]
    result: Tensor = cast(Any, _ZeroGradients).apply(token, *trained)
    return result


class _ZeroGradients(torch.autograd.Function):
    """Stands for what a module computes of its input and its parameters."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, *params: Tensor) -> Tensor:
        # Saved and asked for, so that a checkpoint around this forward recomputes it where it would recompute another.
        ctx.save_for_backward(token)
        ctx.params = params
        return token.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        ctx.saved_tensors  # noqa: B018
        return gradient, *map(torch.zeros_like, ctx.params)


class _Join(torch.autograd.Function):
    """Lets backward reach the token where it reaches tensors."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.token = token.dtype, token.device
        # Copies: autograd does not let users write into views that a function returns.
        return tuple(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        dtype, device = ctx.token
        return torch.zeros((), dtype=dtype, device=device), *gradients
