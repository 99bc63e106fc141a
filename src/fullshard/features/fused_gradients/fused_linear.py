"""Fused gradients: linear layers whose backward writes into the reduce buffer.

    ordinary   product -> gradient in the compute dtype -> `.grad` -> cast and copied into the reduce buffer
    fused      product -> the weight's slot in the reduce buffer, in the reduce dtype

The modules keep their class. `connect` gives each `nn.Linear` that it is for a forward of its own (`forward`), which computes
the same output, and whose backward asks the group's `Reduction` for the place of the weight's gradient. In compiled modules an
operator does that (`compiled_linear`).
A second product of the same weight in a backward, or in a later microbatch, is added there by the product itself. So are
gradients of an input that several such layers read (`shared_inputs`).

Backward returns no gradient for the weight. Autograd runs the parameter's hook nevertheless, when all nodes that use
the weight are done. So arrivals are counted as they always are (`backward_hooks.gradient_arrived`), also for weights that are
used twice, or by other operators, too. Those give the parameter an ordinary gradient, which the reduction adds to what is written.
Gradients of a state are sent off when backward leaves it, if one of its hooks has run. If none has, the weights are used by an
earlier call, to which backward will come; whatever is left is sent off at its end.

Whatever is not exactly a product for this reduction goes the ordinary way; `_fits` and `_place` decide for each
call. The node can do both, so a graph may be used by passes of both kinds.

The outermost module is left out: its gradients are reduced at the end of backward, and the reduce buffer would have memory from
the first of them on.
"""

from __future__ import annotations

import weakref
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard import torch_border
from fullshard.engine.backward_inputs import PASSES_WITH_INPUTS
from fullshard.errors import LifecycleError, UnsupportedError
from fullshard.features.fused_gradients import compiled_linear
from fullshard.features.fused_gradients.shared_inputs import SharedInput, SharedInputs
from fullshard.layout.names import clean_name

if TYPE_CHECKING:
    from fullshard.engine.param_group import FSDPParamGroup
    from fullshard.engine.state import FSDPState
    from fullshard.engine.step import Step

WEIGHT, FORWARD = "weight", "forward"
_FUSED = "_fullshard_fused"
"""The attribute of an `nn.Linear` that has its `FusedWeight`."""


def forward(module: Any, input: Tensor) -> Tensor:
    """Return what `nn.Linear` does: the forward of the modules, bound to each.

    Pickled, a method is its name, so copies of a module from a file have the forward of their class. Other copies have no
    `FusedWeight`.
    """
    fused: FusedWeight | None = getattr(module, _FUSED)
    if fused is None:
        output: Tensor = type(module).forward(module, input)
    elif torch.compiler.is_compiling():
        # The compiler comes by here once for all layers that are alike, so it may see nothing that differs between them.
        output = compiled_linear.product(input, module.weight, module.bias, fused.ticket)
    else:
        output = fused.product(module, input)
    return output


class FusedWeight:
    """The weight of one `nn.Linear` whose gradient is written into the reduce buffer; on the module, as long as it lives."""

    def __init__(
        self, state: FSDPState, group: FSDPParamGroup, index: int, inputs: SharedInputs
    ) -> None:
        self._state = weakref.ref(state)
        self._reduction = group.reduction
        self._param = group.params[index]
        self._index = index
        self._device = group.device
        self._inputs = inputs
        self._reference = weakref.ref(self)  # for graphs, which must not keep the model
        self.ticket = compiled_linear.ticket_of(self)
        """The number by which a compiled graph finds it."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Give copies of the module, pickled or not, None."""
        return _nothing, ()

    def product(self, module: nn.Linear, input: Tensor) -> Tensor:
        """Return what `nn.Linear` does."""
        weight = torch_border.parameter_table(module).get(WEIGHT)
        if weight is None:  # a part of a `FlatParameter` is no parameter
            weight = module.__dict__.get(WEIGHT)
        if weight is None or not self._fits(weight, input):
            return type(module).forward(module, input)
        shared = self._inputs.of(input)
        output: Tensor = _Product.apply(input, weight, module.bias, self._reference, shared)  # type: ignore[no-untyped-call]
        return output

    def _fits(self, weight: Tensor, input: Tensor) -> bool:
        """Return whether this is a plain product with the unsharded parameter, to be differentiated by backward."""
        return (
            weight is self._param.unsharded_param
            and torch.is_grad_enabled()
            and weight.requires_grad
            and type(input) in _PLAIN
            and type(weight) in _PLAIN
            and input.dtype == weight.dtype
            and input.ndim > 0
            and input.layout is torch.strided
            and not input.is_nested
            and not torch_border.tensor_hooks(weight)
            # Ours, which notes arrivals, and no other.
            and len(torch_border.post_accumulate_grad_hooks(weight) or ()) <= 1
            and not torch_border.is_autocast_on(input.device.type)
            and torch_border.innermost_transform() is None
            and torch_border.forward_ad_level() < 0
        )

    def give(self, gradients: Tensor, inputs: Tensor) -> None:
        """Write the product of output gradients and inputs as the weight's gradient, or give it to the parameter.

        For compiled graphs, which return no gradient for the weight, whatever pass they run in.
        """
        param, state = self._param.unsharded_param, self._state()
        if param is not None and state is not None and torch_border.tensor_hooks(param):
            raise UnsupportedError(
                "A compiled module with fuse_gradients gives autograd no gradient of a weight, so a hook on the unsharded "
                f"parameter {self._param.name!r} of {state.name} would see None. Register the hook on the sharded parameter, or leave "
                "fuse_gradients out."
            )
        if self.write(gradients, inputs):
            return
        # A pass with named inputs leaves the gradients of all others alone.
        if param is None or (PASSES_WITH_INPUTS and not torch_border.pass_accumulates(param)):
            return
        self._reduction.give_ordinary(self._index, gradients.t().mm(inputs))

    def write(self, gradients: Tensor, inputs: Tensor) -> bool:
        """Write the product of output gradients and inputs, (rows, features) each, as the weight's gradient.

        Return False, and do nothing, if this pass needs it the ordinary way.
        """
        place = self._place()
        if place is None:
            return False
        target, add = place
        _write_product(gradients.t(), inputs, target, add=add)
        return True

    def _place(self) -> tuple[Tensor, bool] | None:
        state = self._state()
        # A pass with ``create_graph`` differentiates gradients. One with named inputs may not want this one.
        if torch.is_grad_enabled() or PASSES_WITH_INPUTS or state is None or state.step is None:
            return None
        reached = state.step.reached.get(state)
        # Other streams are not ordered before the reduction; autograd orders those of ordinary gradients.
        if reached is None or reached.stream != torch_border.current_stream_id(self._device):
            return None
        reduced = state.options.requires_gradient_sync
        return self._reduction.place_for_product(self._index, reduced=reduced)


def _nothing() -> None:
    """Return None."""


_PLAIN = (Tensor, nn.Parameter)


class _Product(torch.autograd.Function):
    """`F.linear`, whose backward may write the weight's gradient instead of returning it."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        fused: weakref.ref[FusedWeight],
        shared: SharedInput | None,
    ) -> Tensor:
        # As of an ordinary linear layer: without a gradient for its input, backward does not need the weight.
        ctx.save_for_backward(input, weight if ctx.needs_input_grad[0] else None)
        ctx.fused, ctx.shared, ctx.input_shape = fused, shared, input.shape
        if shared is not None:
            shared.add_reader(ctx)
        ctx.set_materialize_grads(False)
        return F.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        shared: SharedInput | None = ctx.shared
        if torch.is_grad_enabled():
            shared = None  # a sum in place could not be differentiated
        of_input = of_weight = of_bias = None
        if gradient is not None:
            input, weight = ctx.saved_tensors
            needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
            rows = gradient.reshape(-1, gradient.shape[-1])
            inputs = input.reshape(-1, input.shape[-1])
            if input.is_complex():
                inputs, weight = inputs.conj(), None if weight is None else weight.conj()
            if needs_input:
                of_input = rows.mm(weight) if shared is None else shared.add_product(rows, weight)
            if needs_bias:
                of_bias = rows.sum(0)
            if needs_weight:
                fused = ctx.fused()
                if fused is None or not fused.write(rows, inputs):
                    of_weight = rows.t().mm(inputs)
        elif shared is not None:
            of_input = shared.add_product(None, None)
        if of_input is not None:
            of_input = of_input.view(ctx.input_shape)
        return of_input, of_weight, of_bias, None, None


def _write_product(one: Tensor, other: Tensor, target: Tensor, *, add: bool) -> None:
    """Write the product of two matrices into ``target`` in its dtype, or add it to what is there."""
    if one.dtype == target.dtype:
        if add:
            torch.addmm(target, one, other, out=target)
        else:
            torch.mm(one, other, out=target)
    elif one.is_cuda and target.dtype == torch.float32:
        # The sum of products is in float32 in any case; here it is not rounded in between.
        if add:
            torch.addmm(target, one, other, out_dtype=target.dtype, out=target)
        else:
            torch.mm(one, other, out_dtype=target.dtype, out=target)
    elif add:
        target.add_(one.mm(other))
    else:
        target.copy_(one.mm(other))


# --- which modules --------------------------------------------------------------------------------


def connect(step: Step) -> None:
    """Give linear layers their forwards, where options say so; between steps."""
    inputs = SharedInputs()
    for state in step.states:
        if not state.options.fuse_gradients:
            continue
        for group in state.groups:
            if state is not step.root:
                group.reduction.write_products()
            for index, param in enumerate(group.params):
                module = param.owners[0].module
                if not isinstance(module, nn.Linear) or param.owners[0].name != WEIGHT:
                    continue
                if _is_fused(module):
                    del module.forward  # of another root
                if state is not step.root and not _reason(group, index):
                    setattr(module, _FUSED, FusedWeight(state, group, index, inputs))
                    module.forward = MethodType(forward, module)  # type: ignore[method-assign]


def reasons(state: FSDPState) -> dict[str, str]:
    """Return, by name, why weight gradients at and below a state are not fused; "" for those that are."""
    step = state.step
    if step is None:
        raise LifecycleError(
            "The first forward of the model decides which gradients are fused. Call fused_gradients() after it."
        )
    below = {module for each in state.modules for module in each.modules()}
    paths = {module: clean_name(name) for name, module in step.root.modules[0].named_modules()}
    found = {}
    for each in step.states:
        if not each.options.fuse_gradients or each.modules[0] not in below:
            continue
        for group in each.groups:
            for index, param in enumerate(group.params):
                if len(param.shape) == 2:
                    owner = param.owners[0]
                    name = f"{paths.get(owner.module, '')}.{owner.name}".removeprefix(".")
                    reason = _reason(group, index)
                    if each is step.root:
                        reason = "it belongs to the outermost module, which is reduced at the end of backward"
                    elif not reason and not param.trainable:
                        reason = "it is frozen"
                    found[name] = reason
    return found


def _is_fused(module: nn.Module) -> bool:
    own = module.__dict__.get(FORWARD)
    return isinstance(own, MethodType) and own.__func__ is forward


def _reason(group: FSDPParamGroup, index: int) -> str:
    """Return why backward cannot write a parameter's gradient; "" if it can."""
    param = group.params[index]
    owner = param.owners[0]
    module = owner.module
    if not isinstance(module, nn.Linear) or owner.name != WEIGHT:
        return "it is not the weight of an nn.Linear"
    if len(param.owners) > 1:
        return "several modules share it"
    if type(module).forward is not nn.Linear.forward:
        return f"its module is a {type(module).__name__}, which has a forward of its own"
    if FORWARD in module.__dict__ and not _is_fused(module):
        return "the forward of its module was replaced"
    if param.placement.unsharded_mesh is not None:
        return "it is tensor-parallel"
    cause = group.reduction.obstacle_to_product(index)
    return f"it is not one piece in the reduce buffer: {cause}" if cause else ""
