"""Compiled functions that are called without the compiler's checks, once these have passed.

A function of `torch.compile` takes longer on the host than the launch of a kernel: it checks shapes, dtypes and the state of
the process, and goes through layers that prepare arguments. A caller with the same tensors in every step needs that once:

    repeat = kernel.run(arguments, varying=(1,))     # checked, as any compiled call
    repeat(other)                                    # the generated code itself, with another tensor as argument 1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Repeat = Callable[..., None]
"""Calls the generated code again, with other tensors for the arguments that vary."""


class CompiledKernel:
    """A compiled function that writes to its arguments, and returns nothing."""

    def __init__(self, function: Callable[..., None]) -> None:
        """Compile a function when it is called."""
        self._ran: list[tuple[Callable[[list[Any]], Any], list[Any], bool]] = []
        """Parts of the last checked call: generated code, its inputs, and whether nothing is left to do after it."""
        # Not `fullgraph`, with which too many kinds of calls would be an error rather than computed without compiling.
        self._checked = torch.compile(function, backend=self._compile)

    def _compile(self, graph: Any, inputs: Sequence[Any]) -> Any:
        import torch._functorch.config as config  # the compiler takes long to import
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        def watched_compile(*args: Any, **kwargs: Any) -> Any:
            found: Any = compile_fx_inner(*args, **kwargs)
            code = found.current_callable

            def watched(inputs: list[Any]) -> Any:
                taken = list(inputs)  # the code empties the list
                result = code(inputs)
                self._ran.append((code, taken, not result))
                return result

            found.current_callable = watched
            return found

        # Results of the cache of whole functions would not have been watched. The cache of generated code is used.
        with config.patch(enable_autograd_cache=False):
            return compile_fx(graph, inputs, inner_compile=watched_compile)

    def run(self, arguments: Sequence[Any], varying: Sequence[int]) -> Repeat | None:
        """Call the function, and return how to call it again with these arguments.

        The tensors at the positions ``varying`` may be others then, with the same shape, strides, dtype and device, without
        gradients, and without memory in common with the rest. So what the compiler has checked stays true.

        Returns:
            None where the compiler does more than call generated code with these very tensors. The next call must be checked.
        """
        self._ran.clear()
        self._checked(*arguments)
        if len(self._ran) != 1:
            return None
        code, inputs, is_all = self._ran.pop()
        own = {id(each): number for number, each in enumerate(arguments)}
        if not is_all or any(isinstance(each, Tensor) and id(each) not in own for each in inputs):
            return None
        places = [
            (place, varying.index(number))
            for place, each in enumerate(inputs)
            if (number := own.get(id(each), -1)) in varying and isinstance(each, Tensor)
        ]
        for place, _ in places:
            inputs[place] = None  # keeps no gradient alive

        def repeat(*tensors: Tensor) -> None:
            given = inputs.copy()
            for place, number in places:
                given[place] = tensors[number]
            code(given)

        return repeat
