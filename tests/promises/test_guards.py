"""All guards in one table: errors and warnings that stop or mark a program that looks legal.

Each has a test of what it must refuse, and one of what it must let through: programs next to the refused ones that are
legal. What judges arguments rather than programs is listed apart (`ARGUMENTS`). The source is searched for errors and
warnings, so that none is missing from both. A `CheckpointError` judges what is in a file or folder: tests/checkpoint has these.
"""

from __future__ import annotations

import ast
import json
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard import (
    ConfigurationError,
    FullyShardedDataParallel,
    LifecycleError,
    UnsupportedError,
    UsageError,
    checkpoint,
    clip_grad_norm_,
    errors,
    fully_shard,
)
from fullshard.api import OptimStateKeyType
from fullshard.checkpoint.state.local_state import LocalModelState
from fullshard.divergence import step_guard
from fullshard.features import clip_grad
from fullshard.fsdp1.wrapper_options import choose_device
from fullshard.optim import EMA, AdamW8bit, ShardedOptimizer, ema, sharded_optimizer
from fullshard.optim.eight_bit import adamw8bit, strips as block_strips
from fullshard.optim.param_cuts import cuts_of_members
from fullshard.tracing.group_facts import states_in
from tests.helpers.fake import fake_world

CPU = torch.device("cpu")
SOURCE = Path(fullshard.__file__).parent
TESTS = Path(__file__).parents[1]
ROOMS = (
    *(
        "fsdp1",
        "fsdp2",
        "engine",
        "features",
        "transport",
        "divergence",
        "mesh",
        "layout",
        "storage",
    ),
    *("optim", "checkpoint", "checks", "drop_in", "tracing", "*.py"),
)
ERRORS = {
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, Exception) and name != "CheckpointError"
}
WARNINGS = {"warn", "warning"}


class Place(NamedTuple):
    """Where an error or a warning is made, and the words of its message."""

    function: str
    text: str


@cache
def places() -> tuple[Place, ...]:
    return tuple(
        place
        for room in ROOMS
        for path in sorted(SOURCE.glob(room if room == "*.py" else f"{room}/**/*.py"))
        for place in _places_in(
            ast.parse(path.read_text()), f"{path.relative_to(SOURCE).as_posix()}::"
        )
    )


def _places_in(node: ast.AST, name: str) -> Iterator[Place]:
    for child in ast.iter_child_nodes(node):
        inner = name
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            inner = f"{name}{'' if name.endswith('::') else '.'}{child.name}"
        if isinstance(child, ast.Call) and _is_message(child.func):
            words = [part.value for part in ast.walk(child) if isinstance(part, ast.Constant)]
            yield Place(name, " ".join(word for word in words if isinstance(word, str)))
        yield from _places_in(child, inner)


def _is_message(called: ast.expr) -> bool:
    """Whether an error is made here, or a warning is given."""
    if isinstance(called, ast.Name):
        return called.id in ERRORS
    return (
        isinstance(called, ast.Attribute)
        and called.attr in WARNINGS
        and isinstance(called.value, ast.Name)
        and called.value.id in ("warnings", "logger")
    )


class Guard(NamedTuple):
    """A guard, by its function and some words of its message."""

    function: str
    says: str
    refuses: str
    """The test of what it must refuse, or warn of."""
    lets_through: str
    """The test of what is legal beside that."""

    def judges(self, place: Place) -> bool:
        says_so = self.says in place.text if self.says else not place.text.strip()
        return place.function == self.function and says_so


# Indented: some words of the message (none if there is only one), the test of what the guard must refuse or warn of, and
# the test of what is legal beside that.
TABLE = """
checks/checked_block.py::CheckedBlock.__exit__
     | checks/test_debug::test_a_race_of_a_comm_object_names_both_places_the_group_and_the_remedy | checks/test_debug::test_a_step_without_races_passes_and_says_how_much_was_checked
checks/checked_block.py::CheckedBlock._refuse_to_say_nothing
    has seen no access | checks/test_debug::test_a_block_in_which_nothing_is_seen_proves_nothing | checks/test_debug::test_a_step_without_races_passes_and_says_how_much_was_checked
checks/stream_check.py::StreamCheck.enter
    needs ranks that do not exist | checks/test_debug::test_ranks_that_exist_are_refused_without_a_gpu | checks/test_debug::test_a_step_without_races_passes_and_says_how_much_was_checked
fsdp1/comm_hooks.py::register
    A wrapper takes one communication hook | fsdp1/test_wrapper::test_methods_of_the_outermost_wrapper_are_refused_below_it | fsdp1/test_wrapper::test_methods_of_the_outermost_wrapper_are_refused_below_it
    replaces one reduction, but hybrid | fsdp1/test_wrapper::test_ranks_are_groups_or_meshes | fsdp1/test_wrapper::test_methods_of_the_outermost_wrapper_are_refused_below_it
    it excludes wire_dtype | promises/test_wire::test_what_makes_no_sense_is_refused_on_all_ranks | promises/test_wire::test_setters_of_reductions_hold
fsdp1/construction.py::materialise
    need a reset_parameters() | fsdp1/test_wrapper::test_meta_modules_get_memory_and_values | fsdp1/test_wrapper::test_meta_modules_get_memory_and_values
    param_init_fn must materialise | fsdp1/test_wrapper::test_meta_modules_get_memory_and_values | fsdp1/test_wrapper::test_meta_modules_get_memory_and_values
fsdp1/construction.py::_check_all_ranks_can_receive
    With sync_module_states | fsdp1/test_wrapper::test_if_one_rank_cannot_receive_them_all_raise | fsdp1/test_wrapper::test_all_ranks_get_the_values_of_rank_0
fsdp1/construction.py::_check
    must be plain tensors | storage/test_subclasses::test_parts_of_them_cannot_be_kept_and_wrappers_do_not_flatten_them | fsdp1/test_wrapper::test_ignored_modules_and_parameters_are_left_alone
    those of torch.jit do | promises/test_legal_programs::test_a_forward_makes_a_container_a_module_that_can_be_sharded | promises/test_legal_programs::test_a_forward_makes_a_container_a_module_that_can_be_sharded
    have hooks on their gradients | promises/test_unnoticed::test_hooks_on_flat_parameters_run_and_those_that_cannot_are_refused | promises/test_unnoticed::test_hooks_on_flat_parameters_run_and_those_that_cannot_are_refused
    so all or none must be | fsdp1/test_wrapper::test_parameters_that_do_not_go_together_are_named | fsdp1/test_wrapper::test_parameters_that_do_not_go_together_are_named
    of one dtype, but there are | fsdp1/test_wrapper::test_parameters_that_do_not_go_together_are_named | fsdp1/test_wrapper::test_parameters_that_do_not_go_together_are_named
fsdp1/construction.py::_placements
    Parameters that are DTensors | fsdp1/test_wrapper_tensor_parallel::test_whole_parameters_of_parallel_modules_are_dtensors | fsdp1/test_wrapper_tensor_parallel::test_tensor_parallel_modules_in_wrappers_train_as_one_process
fsdp1/state_dicts/loadable_optimizer_state.py::_agree_on_keys
     | fsdp1/test_wrapper_optimizer_agreement::test_what_differs_between_ranks_is_the_same_error_on_all | fsdp1/test_wrapper_optimizer_agreement::test_what_is_there_is_loaded
fsdp1/state_dicts/optimizer_params.py::ModelParams.__init__
    within summon_full_params | fsdp1/test_wrapper_optimizer_states::test_what_cannot_be_accounted_for_is_refused_by_name_on_all_ranks | fsdp1/test_wrapper_optimizer_states::test_state_dicts_are_those_of_torch
fsdp1/state_dicts/optimizer_params.py::refuse_unknown_params
     | promises/test_guards::test_optimizers_of_other_models_are_refused | fsdp1/test_wrapper_optimizer_agreement::test_an_optimizer_may_leave_out_what_its_rank_has_nothing_of
fsdp1/state_dicts/optimizer_params.py::warn_deprecated
    and choose the kind of state | fsdp1/test_wrapper_optimizer_states::test_old_methods_say_what_replaces_them | fsdp1/test_wrapper_optimizer_states::test_state_dicts_are_those_of_torch
    optim_input is deprecated | fsdp1/test_wrapper_optimizer_states::test_old_methods_say_what_replaces_them | fsdp1/test_wrapper_optimizer_states::test_state_dicts_are_those_of_torch
fsdp1/state_dicts/optimizer_state_reports.py::agreed_states
     | fsdp1/test_wrapper_optimizer_states::test_what_cannot_be_accounted_for_is_refused_by_name_on_all_ranks | fsdp1/test_wrapper_optimizer_states::test_unusual_state_is_kept
fsdp1/state_dicts/optimizer_state_reports.py::_refuse_unreadable
     | fsdp1/test_wrapper_optimizer_states::test_what_cannot_be_accounted_for_is_refused_by_name_on_all_ranks | fsdp1/test_wrapper_optimizer_states::test_checkpoints_cross_over_from_torch_and_to_torch
fsdp1/state_dicts/optimizer_params.py::rekeyed
     | fsdp1/test_wrapper_optimizer_states::test_what_cannot_be_accounted_for_is_refused_by_name_on_all_ranks | fsdp1/test_wrapper_optimizer_states::test_state_dicts_are_those_of_torch
    Every id must mean one | fsdp1/test_wrapper_optimizer_states::test_what_cannot_be_accounted_for_is_refused_by_name_on_all_ranks | fsdp1/test_wrapper_optimizer_states::test_state_dicts_are_those_of_torch
    Every key of the state dict | fsdp1/test_wrapper_optimizer_states::test_what_cannot_be_accounted_for_is_refused_by_name_on_all_ranks | fsdp1/test_wrapper_optimizer_states::test_state_dicts_are_those_of_torch
fsdp1/state_dicts/saved_optimizer_state.py::optim_state_dict
    have no LOCAL_STATE_DICT | fsdp1/test_wrapper_optimizer_states::test_what_cannot_be_accounted_for_is_refused_by_name_on_all_ranks | fsdp1/test_wrapper_tensor_parallel::test_state_dicts_of_parallel_modules_are_saved_and_loaded
fsdp1/state_dicts/settings.py::settings_of
    All wrappers of a model | fsdp1/test_wrapper_state_dicts::test_settings_hold_for_a_while_or_for_good | fsdp1/test_wrapper_state_dicts::test_settings_hold_for_a_while_or_for_good
fsdp1/state_dicts/settings.py::_refuse_mixture
    wrapped by one library | promises/test_torch_state_dict_functions::test_what_is_not_loaded_stays_and_mixtures_are_refused | promises/test_torch_state_dict_functions::test_state_dicts_are_those_of_torch_s_wrapper_and_are_loaded
fsdp1/state_dicts/model_state.py::_begin
    within summon_full_params | fsdp1/test_wrapper_state_dicts::test_what_cannot_be_loaded_is_named_and_nothing_is_left_half_done | fsdp1/test_wrapper_state_dicts::test_entries_are_those_of_torch
fsdp1/state_dicts/model_state.py::_add_local_entries
    does not shard | fsdp1/test_wrapper_state_dicts::test_without_shards_there_is_no_local_state_dict | fsdp1/test_wrapper_state_dicts::test_a_rank_may_hold_nothing_of_a_local_state_dict
fsdp1/state_dicts/model_state.py::_check_sharded_entries
    same sharded entries | fsdp1/test_wrapper_state_dicts::test_sharded_entries_must_be_those_of_all_ranks | fsdp1/test_wrapper_state_dicts::test_what_was_saved_can_be_loaded
fsdp1/state_dicts/model_state.py::_prepare_local_entries
    LOCAL_STATE_DICT is for the same wrapping | fsdp1/test_wrapper_state_dicts::test_what_cannot_be_loaded_is_named_and_nothing_is_left_half_done | fsdp1/test_wrapper_state_dicts::test_a_rank_may_hold_nothing_of_a_local_state_dict
fsdp1/summon_full_params.py::summon_full_params
    cannot be nested | fsdp1/test_wrapper_summoning::test_whole_parameters_are_shown_in_all_ways | fsdp1/test_wrapper_summoning::test_whole_parameters_are_shown_in_all_ways
    must keep their shapes | fsdp1/test_wrapper_summoning::test_other_shapes_are_refused_and_everything_is_put_back | fsdp1/test_wrapper_summoning::test_what_is_written_is_kept_and_used
fsdp1/summon_full_params.py::check_full_params
    only rank 0 has full parameters to compute | fsdp1/test_wrapper_summoning::test_forward_computes_with_summoned_parameters | fsdp1/test_wrapper_summoning::test_forward_computes_with_summoned_parameters
fsdp1/summon_full_params.py::_check_full_gradients
    these have a FlatParameter | fsdp1/test_wrapper_summoning::test_arguments_that_exclude_each_other_are_refused | fsdp1/test_wrapper_summoning::test_gradients_are_shown_whole_and_written_back
    with_grads=True needs reduced | engine/test_unreduced_gradients::test_no_optimizer_updates_pieces_with_gradients_that_were_not_reduced | fsdp1/test_wrapper_summoning::test_gradients_are_shown_whole_and_written_back
fsdp1/wrapper.py::FullyShardedDataParallel.__init__
    has no forward, but | fsdp1/test_wrapper::test_containers_without_forward_are_warned_of | promises/test_legal_programs::test_a_forward_makes_a_container_a_module_that_can_be_sharded
fsdp1/wrapper.py::FullyShardedDataParallel.__deepcopy__
    cannot be copied | fsdp1/test_wrapper::test_a_wrapper_stands_for_its_module | fsdp2/test_fully_shard::test_a_state_dict_can_be_copied_deeply
fsdp1/wrapper.py::FullyShardedDataParallel._before_conversion
    cannot be moved or cast | fsdp1/test_wrapper_summoning::test_arguments_that_exclude_each_other_are_refused | engine/test_replaced_params::test_everybody_sees_what_was_put_in_a_parameters_place
fsdp1/wrapper.py::FullyShardedDataParallel.clip_grad_norm_
    found no gradients | promises/test_guards::test_clipping_without_gradients_is_warned_of | promises/test_guards::test_clipping_without_gradients_is_warned_of
fsdp1/wrapper_base.py::WrapperBase._require_root
    outermost wrapper | fsdp1/test_wrapper::test_methods_of_the_outermost_wrapper_are_refused_below_it | fsdp1/test_wrapper::test_methods_of_the_outermost_wrapper_are_refused_below_it
fsdp1/wrapper_base.py::WrapperBase._require_idle
    within forward or backward | fsdp1/test_wrapper_summoning::test_not_within_forward_or_backward | fsdp1/test_wrapper_summoning::test_between_forward_and_backward_parameters_are_the_sharded_ones
fsdp1/wrapper_options.py::read_options
    is ignored, so nothing in it | promises/test_kinds_of_errors::test_what_torch_warns_of_is_warned_of | fsdp1/test_wrapper::test_ignored_modules_and_parameters_are_left_alone
    There is one rank to shard over | promises/test_kinds_of_errors::test_what_torch_warns_of_is_warned_of | fsdp1/test_wrapper::test_one_rank_shards_nothing_and_keeps_shapes
fsdp1/wrapper_options.py::choose_device
    must be on one device | promises/test_guards::test_a_wrapped_module_on_two_devices_is_refused | promises/test_guards::test_a_wrapped_module_on_two_devices_is_refused
    but the module is on | promises/test_guards::test_a_wrapped_module_on_two_devices_is_refused | promises/test_guards::test_a_wrapped_module_on_two_devices_is_refused
fsdp1/wrapper_options.py::choose_ignored
    Wrappers cannot be ignored | fsdp1/test_wrapper::test_ignored_modules_and_parameters_are_left_alone | fsdp1/test_wrapper::test_ignored_modules_and_parameters_are_left_alone
fsdp1/wrapper_options.py::wrap_below
    have wrappers of their own | promises/test_kinds_of_errors::test_what_torch_warns_of_is_warned_of | fsdp1/test_wrapper::test_batch_norm_is_wrapped_by_itself_in_full_precision
fsdp1/wrapper_options.py::_check_one_wrapper_per_param
    A parameter | fsdp1/test_wrapper::test_parameters_of_several_wrappers_are_named_before_any_is_made | fsdp1/test_wrapper::test_policies_choose_wrappers_and_their_options
fsdp2/comm_checks.py::check_comms_can_be_chosen
    is replicated and has none | transport/test_comm_memory::test_what_excludes_each_other_is_refused_in_either_order | transport/test_comm_memory::test_what_does_not_exclude_each_other_is_not_refused
    exclude each other | transport/test_comm_memory::test_what_excludes_each_other_is_refused_in_either_order | transport/test_comm_memory::test_what_does_not_exclude_each_other_is_not_refused
    cannot choose where | transport/test_comm_memory::test_what_excludes_each_other_is_refused_in_either_order | transport/test_comm_memory::test_what_does_not_exclude_each_other_is_not_refused
fsdp2/comm_checks.py::check_reduce_scatters
    changes the reduce-scatter | promises/test_wire::test_what_makes_no_sense_is_refused_on_all_ranks | promises/test_wire::test_setters_of_reductions_hold
fsdp2/comm_checks.py::check_one_input_buffer
    one reduce-scatter input buffer | transport/test_comm_memory::test_what_excludes_each_other_is_refused_in_either_order | transport/test_comm_memory::test_what_does_not_exclude_each_other_is_not_refused
fsdp2/fsdp_module.py::FSDPModule.__new__
    no instances of its own | fsdp2/test_fully_shard::test_the_class_of_methods_is_not_for_making | fsdp2/test_fully_shard::test_a_slice_of_a_sharded_container_is_an_ordinary_container
fsdp2/fsdp_module.py::FSDPModule.__deepcopy__
    cannot be copied | fsdp2/test_fully_shard::test_deepcopy_is_refused | fsdp2/test_fully_shard::test_parameters_are_copied_with_their_gradients_and_optimizers
fsdp2/fsdp_module.py::FSDPModule.reset_iter_state
    must be called on the root | promises/test_kinds_of_errors::test_misuse_raises_what_torch_raises | promises/test_failures::test_after_a_failed_step_the_next_one_works
fsdp2/fsdp_module.py::FSDPModule.set_all_reduce_hook
    stream cannot be chosen | fsdp2/test_fsdp_module::test_a_hook_s_stream_is_refused_with_hsdp | fsdp2/test_fsdp_module::test_a_setter_does_what_torch_s_does_with_hsdp
fsdp2/fsdp_module.py::FSDPModule.set_reduce_scatter_divide_factor
    is deprecated | fsdp2/test_fsdp_module::test_the_old_name_of_the_divide_factor_warns | fsdp2/test_fsdp_module::test_the_divide_factor_replaces_the_number_of_ranks
fsdp2/fsdp_module.py::FSDPModule.set_force_sum_reduction_for_comms
    can only sum | transport/test_comm_memory::test_what_excludes_each_other_is_refused_in_either_order | transport/test_comm_memory::test_reductions_are_symmetric_only_if_they_sum
fsdp2/fully_shard.py::_checked_modules
    these modules have none | promises/test_legal_programs::test_a_forward_makes_a_container_a_module_that_can_be_sharded | promises/test_legal_programs::test_a_forward_makes_a_container_a_module_that_can_be_sharded
    modules of torch.jit cannot have | promises/test_legal_programs::test_a_forward_makes_a_container_a_module_that_can_be_sharded | promises/test_legal_programs::test_a_forward_makes_a_container_a_module_that_can_be_sharded
    replicate was applied | promises/test_client_attributes::test_torch_s_replicate_leaves_sharded_modules_alone_and_the_other_way_round | promises/test_client_attributes::test_torch_s_replicate_leaves_sharded_modules_alone_and_the_other_way_round
    it was applied before | promises/test_kinds_of_errors::test_misuse_raises_what_torch_raises | fsdp2/test_fully_shard::test_deep_nesting
fsdp2/fully_shard.py::_read_reshard_after_forward
    =1 keeps the gathered | promises/test_guards::test_a_number_that_keeps_gathered_parameters_is_warned_of | engine/test_meshes::test_parts_kept_after_forward_change_no_result
fsdp2/fully_shard.py::_check_post_forward_size
    must divide the shard size | promises/test_kinds_of_errors::test_misuse_raises_what_torch_raises | engine/test_meshes::test_backward_gathers_over_fewer_ranks
    needs plain tensors | storage/test_subclasses::test_parts_of_them_cannot_be_kept_and_wrappers_do_not_flatten_them | storage/test_subclasses::test_a_subclass_without_the_protocol_is_sharded_by_its_own_operators
fsdp2/fully_shard.py::_params_to_shard
    on the data-parallel mesh already | promises/test_unnoticed::test_a_model_that_torch_has_sharded_in_part_is_refused_with_the_cause_first | engine/test_meshes::test_tensor_parallel_models_train_like_torch_s
    Parameters that are DTensors | engine/test_meshes::test_mistakes_are_the_same_clear_error_on_every_rank | engine/test_meshes::test_parameters_on_one_mesh_for_everything
fsdp2/group_plan.py::GroupPlan.apply
    A plan can be applied once | features/test_grouping::test_a_plan_is_applied_once_and_to_the_model_it_was_made_for | features/test_grouping::test_a_plan_is_applied_once_and_to_the_model_it_was_made_for
divergence/active_dropout.py::warn_of_active_dropout
    model.eval() was not called | promises/test_unnoticed::test_dropout_without_gradients_is_named_before_ranks_generate_different_texts | promises/test_unnoticed::test_dropout_without_gradients_is_named_before_ranks_generate_different_texts
divergence/agreement.py::_compare
     | divergence/test_agreement::test_a_rank_with_another_model_is_named_on_all_ranks | promises/test_legal_programs::test_ranks_may_ignore_different_modules_if_the_rest_is_the_same
features/at_rest.py::bring_to_rest
    within forward or backward | checkpoint/state/test_local_state::test_models_must_rest | checkpoint/state/test_local_state::test_models_must_rest
    within summon_full_params | checkpoint/state/test_local_state::test_models_must_rest | checkpoint/state/test_local_state::test_models_must_rest
engine/backward_inputs.py::_graph_inputs
    torch.autograd.grad returns | promises/test_unnoticed::test_backward_accumulates_into_the_sharded_parameters_that_are_named | promises/test_unnoticed::test_backward_accumulates_into_the_sharded_parameters_that_are_named
engine/backward_inputs.py::needed_too_late
    whose memory has been freed | promises/test_outputs::test_weights_that_are_needed_too_late_are_an_error_that_names_the_module | promises/test_outputs::test_returned_parameters_and_objects_train_as_in_one_process
engine/second_order.py::SecondOrder.finish
    makes no graph | promises/test_transforms::test_gradients_by_parameters_have_no_graph_and_that_is_said | promises/test_transforms::test_gradient_penalties_are_those_of_one_process
engine/step.py::_weights_have_changed
    must not change between | promises/test_unnoticed::test_a_step_between_forward_and_backward_is_refused | promises/test_legal_programs::test_full_parameters_that_were_only_read_leave_a_backward_legal
engine/captures.py::_check_capturable
    A step is captured | engine/test_captures::test_what_cannot_be_captured_is_refused_with_its_reason | engine/test_captures::test_neither_events_nor_gathered_parameters_cross_the_border_of_a_capture
    while a trace is recorded | engine/test_captures::test_what_cannot_be_captured_is_refused_with_its_reason | engine/test_captures::test_neither_events_nor_gathered_parameters_cross_the_border_of_a_capture
    The first forward and the first backward | engine/test_captures::test_what_cannot_be_captured_is_refused_with_its_reason | engine/test_captures::test_neither_events_nor_gathered_parameters_cross_the_border_of_a_capture
features/clip_grad.py::clip_grad_norm_
    makes the host read the norm | promises/test_guards::test_what_counts_on_the_host_is_refused_within_a_capture | features/test_clipping::test_unusual_gradients_have_one_norm_on_all_ranks
    must be finite | features/test_clipping::test_unusual_gradients_have_one_norm_on_all_ranks | features/test_clipping::test_unusual_gradients_have_one_norm_on_all_ranks
features/clip_grad.py::_params_of
    these are unsharded now | features/test_clipping::test_unusual_gradients_have_one_norm_on_all_ranks | features/test_clipping::test_norms_and_gradients_are_those_of_one_process
features/full_params.py::_raise_together
    On ranks | engine/test_replaced_params::test_what_cannot_take_a_parameters_place_is_the_same_error_on_all_ranks | engine/test_replaced_params::test_everybody_sees_what_was_put_in_a_parameters_place
    the same dtypes on all ranks | engine/test_replaced_params::test_parameters_that_cannot_be_taken_over_are_named | engine/test_replaced_params::test_everybody_sees_what_was_put_in_a_parameters_place
features/fused_gradients/fused_linear.py::FusedWeight.give
    a hook on the unsharded | features/fused_gradients/test_compiled_linear::test_a_hook_that_would_see_no_gradient_is_refused | features/fused_gradients/test_compiled_linear::test_passes_that_need_ordinary_gradients_have_them
features/fused_gradients/fused_linear.py::reasons
    decides which gradients | promises/test_guards::test_what_the_first_forward_decides_is_not_told_before | features/fused_gradients/test_fused_linear::test_a_summary_says_which_weights_and_why
features/graphs/graphed_step.py::GraphedStep._say_eager
    runs eagerly | features/graphs/test_graphed::test_on_the_cpu_a_graphed_step_is_the_step_and_ranks_do_what_the_most_careful_one_wants | gpu/test_graphed::test_traced_and_evaluated_steps_run_eagerly_between_replays
features/graphs/graphed_step.py::GraphedStep._entry_of
    is captured again | gpu/test_graphed::test_what_was_baked_in_and_has_changed_is_captured_again | features/graphs/test_graphed::test_inputs_are_of_one_kind_if_only_the_elements_of_their_tensors_differ
features/graphs/graphed_step.py::GraphedStep._capture
    not given as optimizer | gpu/test_graphed::test_a_step_that_cannot_be_captured_runs_eagerly_and_says_why_once | gpu/test_graphed::test_what_was_baked_in_and_has_changed_is_captured_again
features/group_units.py::GroupingOptions.check
    plan_groups takes the outermost | features/test_grouping::test_only_modules_with_a_forward_are_planned | features/test_grouping::test_the_root_may_be_a_sequential
    plan_groups needs parameters | features/test_grouping::test_without_parameters_there_is_nothing_to_plan | features/test_grouping::test_modules_that_are_sharded_already_are_left_alone
divergence/guarded_step.py::_guard_of
    nothing here is | divergence/test_guarded_step::test_a_failure_reaches_all_ranks_and_only_what_can_be_skipped_is_skipped | divergence/test_guarded_step::test_a_rank_alone_may_skip_its_steps_too
features/join.py::JoinedBatches.__init__
    needs a model that is sharded | features/test_join::test_models_are_as_before_however_a_block_is_left | features/test_join::test_any_rank_may_have_any_number_of_batches
features/join.py::JoinedBatches.__enter__
    before it is entered again | features/test_join::test_models_are_as_before_however_a_block_is_left | features/test_join::test_programs_are_told_whose_batches_count_in_every_epoch
features/join.py::JoinedBatches._entered
    in its block only | features/test_join::test_models_are_as_before_however_a_block_is_left | features/test_join::test_any_rank_may_have_any_number_of_batches
features/join.py::_ModelRanks.lend
    must be | features/test_join::test_a_batch_that_cannot_be_lent_ends_all | features/test_join::test_any_rank_may_have_any_number_of_batches
features/join.py::_check_data
    draw batches until | features/test_join::test_data_that_fails_on_one_rank_ends_all | features/test_join::test_any_rank_may_have_any_number_of_batches
features/backward_finalization.py::GradientReductionHandle.wait
    has dropped since | features/test_backward_finalization::test_calls_at_the_wrong_place_are_refused | features/test_backward_finalization::test_reductions_are_in_flight_until_the_handle_waits
features/backward_finalization.py::set_manual
    must be called between steps | features/test_backward_finalization::test_calls_at_the_wrong_place_are_refused | features/test_backward_finalization::test_calls_at_the_wrong_place_are_refused
features/backward_finalization.py::finalize
    does not finalize itself | features/test_backward_finalization::test_calls_at_the_wrong_place_are_refused | features/test_backward_finalization::test_reductions_are_in_flight_until_the_handle_waits
    outside of forward and backward | features/test_backward_finalization::test_calls_at_the_wrong_place_are_refused | features/test_backward_finalization::test_gradients_are_those_of_a_backward_that_ends_by_itself_and_of_torch
features/backward_finalization.py::_check_is_root
    must be called on the root module | features/test_backward_finalization::test_calls_at_the_wrong_place_are_refused | features/test_backward_finalization::test_calls_at_the_wrong_place_are_refused
engine/lazy_init.py::lazy_init
    is for the root module | features/test_backward_finalization::test_modules_below_the_root_are_named_at_the_first_forward | features/test_backward_finalization::test_modules_below_the_root_are_named_at_the_first_forward
    must be sharded on its own | engine/test_step::test_a_list_of_modules_is_no_root | fsdp2/test_grouped_modules::test_modules_of_a_group_run_without_their_model
engine/lazy_init.py::_former_steps
    new outermost module only between steps | promises/test_as_in_torch::test_a_root_cannot_be_changed_within_a_forward | engine/test_step::test_the_root_is_the_state_whose_forward_comes_first
engine/lazy_init.py::_check_ready
    Parameters must be on | promises/test_failures::test_a_mistake_is_the_same_clear_error_on_every_rank | fsdp2/test_fully_shard::test_a_model_built_on_meta_is_materialised_after_sharding
engine/hooks.py::_refusal
    must not be returned inside | promises/test_outputs::test_a_parameter_returned_in_an_unknown_object_is_an_error_that_names_the_module | promises/test_outputs::test_returned_parameters_and_objects_train_as_in_one_process
engine/optimizer_checks.py::check
    has a table of torch's optimizers | optim/test_torch_optimizers::test_optimizers_that_may_need_whole_tensors_are_named_with_the_parameters | optim/test_torch_optimizers::test_every_optimizer_does_what_the_table_says
engine/optimizer_checks.py::warn_of_pieces
    if it updates each element | optim/test_torch_optimizers::test_optimizers_that_may_need_whole_tensors_are_named_with_the_parameters | optim/test_torch_optimizers::test_every_elementwise_optimizer_computes_on_local_tensors
engine/ownership.py::check_not_sharded_by_torch
    torch.distributed.fsdp has sharded | promises/test_unnoticed::test_a_model_that_torch_has_sharded_in_part_is_refused_with_the_cause_first | fsdp1/test_wrapper::test_wrappers_can_be_in_wrappers_but_not_with_a_policy
engine/ownership.py::check_can_be_owned
    A parameter belongs to one group | promises/test_failures::test_a_mistake_is_the_same_clear_error_on_every_rank | fsdp2/test_fully_shard::test_a_list_of_modules_forms_one_group_and_is_returned
    gradients must be dense | promises/test_failures::test_a_mistake_is_the_same_clear_error_on_every_rank | fsdp2/test_fully_shard::test_ignored_parameters_are_left_alone
engine/ownership.py::check_real_for_wire
    these are complex | fsdp1/test_wrapper::test_parameters_that_do_not_go_together_are_named | engine/test_complex::test_complex_parameters_are_trained_as_in_one_process
features/backward_finalization.py::_check_finalized
    Backward must be finalized before | features/test_backward_finalization::test_no_optimizer_steps_before_backward_is_finalized | features/test_backward_finalization::test_no_optimizer_steps_before_backward_is_finalized
features/pipelines.py::_check_reduced
    A pipeline's step must end | features/test_pipelining::test_a_failed_step_is_not_optimized_and_the_next_one_is_right | features/test_pipelining::test_a_step_may_reduce_nothing
features/padding.py::warn_of_padding
     | layout/test_balanced_placement::test_a_model_that_is_padded_a_lot_is_told_once_with_all_groups_and_the_remedy | layout/test_balanced_placement::test_nothing_is_said_of_little_padding
engine/plain_params.py::compare_plain_gradients
    nothing reduces their gradients | engine/test_plain_params::test_parameters_that_drift_apart_are_named_once | engine/test_plain_params::test_nothing_is_said_of_parameters_that_are_reduced_or_left_alone
engine/param_group.py::FSDPParamGroup.check_nothing_assigned
    only while they are sharded | engine/test_replaced_params::test_parameters_that_cannot_be_taken_over_are_named | engine/test_replaced_params::test_parameters_may_change_places
engine/process_hooks.py::_before_step
    Gradients must be reduced before | engine/test_unreduced_gradients::test_no_optimizer_updates_pieces_with_gradients_that_were_not_reduced | engine/test_unreduced_gradients::test_other_calls_leave_what_waits_as_it_should_be
engine/process_hooks.py::_check_params
    was made before the model was sharded | promises/test_unnoticed::test_an_optimizer_over_tensors_that_never_get_gradients_is_refused | promises/test_applied_by_torch::test_optimizers_in_backward_train_as_outside_of_it
    while these parameters were unsharded | promises/test_unnoticed::test_an_optimizer_over_tensors_that_never_get_gradients_is_refused | promises/test_unnoticed::test_optimizers_applied_in_backward_step_when_gradients_arrive
    has replaced in the | promises/test_unnoticed::test_an_optimizer_over_tensors_that_never_get_gradients_is_refused | optim/test_optim::test_state_and_memory_are_the_user_s
engine/interruption.py::reset_unfinished
    did not finish | promises/test_interrupts::test_after_an_interrupt_in_the_models_code_the_next_pass_is_right | promises/test_interrupts::test_a_model_that_calls_itself_has_not_been_interrupted
engine/root_model.py::RootModel._check_tree
    should be sharded or ignored | promises/test_unnoticed::test_modules_and_parameters_that_join_a_sharded_model_are_named | promises/test_legal_programs::test_parameters_that_others_reduce_may_join_a_sharded_model
features/skipped_forward.py::skip_forward
    within a transform | promises/test_skipped_forward::test_wrong_skips_are_refused_before_a_collective | promises/test_transforms::test_modules_may_be_gathered_by_hand_within_a_transform
    so the argument must | promises/test_skipped_forward::test_wrong_skips_are_refused_before_a_collective | promises/test_skipped_forward::test_what_is_skipped_returns_what_it_is_given
engine/extension_codec.py::agree_on_sizes
    same size on every rank | engine/test_self_gathered::test_ranks_that_send_different_sizes_are_refused_on_all_of_them | engine/test_self_gathered::test_uneven_shards_are_padded
transport/comm_objects.py::SymmetricPool._new_block
    must be registered | transport/test_comm_memory::test_symmetric_memory_that_cannot_be_registered_says_so | transport/test_comm_memory::test_symmetric_memory_is_made_once_and_shared_by_all_groups
transport/comm_objects.py::check_group_allocates
    whose backend allocates | transport/test_comm_memory::test_a_backend_without_such_memory_is_refused_on_all_ranks | transport/test_comm_memory::test_reductions_are_staged_in_memory_of_their_own_group
transport/comm_objects.py::choose_symmetric_memory
    a process group that communicates | transport/test_comm_memory::test_a_backend_without_such_memory_is_refused_on_all_ranks | transport/test_comm_memory::test_nothing_is_to_be_turned_off_by_default
    must be part of this torch | transport/test_comm_memory::test_a_torch_without_symmetric_memory_says_so | transport/test_comm_memory::test_nothing_is_to_be_turned_off_by_default
transport/collectives.py::check_exchanges
    nothing is sharded here | promises/test_wire::test_what_makes_no_sense_is_refused_on_all_ranks | promises/test_wire::test_one_rank_takes_the_options_of_many
    exchanges memory on | promises/test_wire::test_gloo_does_not_exchange_memory_of_accelerators | promises/test_wire::test_gradients_are_summed_by_the_receiver
engine/routes.py::Routes.late_extensions
    keeps plain tensors | storage/test_subclasses::test_parts_of_them_cannot_be_kept_and_wrappers_do_not_flatten_them | storage/test_subclasses::test_shards_end_as_with_torch
divergence/compared_updates.py::refuse_within_guarded_step
    A guarded step ends before | divergence/test_guarded_step::test_a_failure_reaches_all_ranks_and_only_what_can_be_skipped_is_skipped | divergence/test_guarded_step::test_a_run_goes_on_after_failures_anywhere_as_if_no_rank_had_seen_those_batches
divergence/meetings.py::_agree
    same number of microbatches | divergence/test_meetings::test_ranks_that_call_different_collectives_raise_the_same_error_and_can_go_on | promises/test_skipped_forward::test_towers_of_all_shapes_train_as_in_one_process
divergence/meetings.py::_different_updates
    the same optimizer | divergence/test_compared_updates::test_ranks_with_other_updates_raise_the_same_error_and_can_go_on | divergence/test_compared_updates::test_differences_that_change_nothing_are_no_error
divergence/step_guard.py::StepGuard.begin
    cannot contain each other | divergence/test_guarded_step::test_a_failure_reaches_all_ranks_and_only_what_can_be_skipped_is_skipped | divergence/test_guarded_step::test_ranks_of_several_process_groups_leave_together_whoever_fails
divergence/step_guard.py::step_failed
    have left the step | divergence/test_guarded_step::test_a_failure_reaches_all_ranks_and_only_what_can_be_skipped_is_skipped | divergence/test_guarded_step::test_a_run_goes_on_after_failures_anywhere_as_if_no_rank_had_seen_those_batches
divergence/step_guard.py::_link_to_all
    form a mesh | promises/test_guards::test_process_groups_that_hang_together_in_no_order_are_refused | divergence/test_guarded_step::test_ranks_of_several_process_groups_leave_together_whoever_fails
divergence/verdict.py::Verdict.raise_if_diverged
     | divergence/test_meetings::test_a_wait_ends_with_the_verdict_of_the_watchdog | promises/test_divergence::test_every_rank_ends_soon_and_is_told_why
divergence/verdict.py::Verdict.explain
     | divergence/test_meetings::test_a_rank_that_has_gone_is_named_at_once | promises/test_divergence::test_every_rank_ends_soon_and_is_told_why
divergence/watchdog/thread.py::Watchdog._judge_alone
    Nothing is proven | divergence/test_silent_hosts::test_ranks_go_on_when_the_network_comes_back_and_end_when_it_does_not | divergence/test_watchdog::test_survivors_name_the_rank_that_is_gone_and_wait_for_one_that_is_slow
divergence/watchdog/stalls.py::StallReports.note
    %s | divergence/test_watchdog_observation::test_a_stall_is_noted_once_and_printed_less_and_less_often_by_one_rank | divergence/test_watchdog_judge::test_a_rank_in_its_own_code_is_slow_and_its_line_is_named
mesh/axes.py::_check_order
    in ascending order | engine/test_meshes::test_ranks_that_a_mesh_shards_over_out_of_order_are_named_on_all_ranks | engine/test_meshes::test_a_mesh_may_have_the_order_of_its_process_group
mesh/axes.py::ranks_by_replica
    rows and columns of a grid | checkpoint/state/test_local_state::test_uneven_groups_are_refused | divergence/test_agreement::test_ranks_with_other_meshes_are_named_on_all_ranks
mesh/axes.py::check_mesh
    must be in the mesh | promises/test_failures::test_a_rank_outside_of_the_mesh_is_told_so | engine/test_meshes::test_parameters_of_one_module_on_several_meshes
mesh/axes.py::node_groups
    To shard within nodes | fsdp1/test_wrapper::test_options_that_cannot_be_are_refused | promises/test_wrapper_numerics::test_without_groups_nodes_shard_and_replicas_are_across_them
layout/placement.py::DTensorPlacer._on_whole_mesh
    not a DTensor on the mesh | engine/test_meshes::test_mistakes_are_the_same_clear_error_on_every_rank | engine/test_meshes::test_parameters_on_one_mesh_for_everything
    not Replicate() along | engine/test_meshes::test_mistakes_are_the_same_clear_error_on_every_rank | engine/test_meshes::test_parameters_on_one_mesh_for_everything
layout/placement.py::DTensorPlacer._join
    does not go with the data-parallel one | engine/test_meshes::test_mistakes_are_the_same_clear_error_on_every_rank | engine/test_meshes::test_tensor_parallel_models_train_like_torch_s
storage/flat_parameter.py::ShardedAttribute.__torch_dispatch__
    is sharded now | fsdp1/test_wrapper::test_flattened_parameters_leave_stand_ins | fsdp1/test_wrapper::test_flattened_parameters_leave_stand_ins
storage/param.py::UnshardedWrites._put_back
    must be like those it had | promises/test_writes::test_assigned_data_must_be_like_those_that_were_there | promises/test_writes::test_what_a_forward_writes_is_used_as_in_one_process
storage/shard_storage.py::ShardStorage.replacements
    may be replaced by others of their kind | fsdp2/test_fully_shard::test_assigning_full_tensors_is_an_error_that_names_them_all | promises/test_legal_programs::test_shards_that_are_made_again_may_be_of_another_kind
    on one device; group | fsdp2/test_grouped_modules::test_a_group_of_which_only_a_part_was_moved_is_refused | fsdp2/test_grouped_modules::test_a_group_of_several_modules_is_materialised_and_cast
storage/shard_storage.py::ShardStorage._check_not_tied
    must be tied before | engine/test_replaced_params::test_parameters_that_are_tied_after_they_were_sharded_are_named | engine/test_replaced_params::test_parameters_may_change_places
storage/shard_storage.py::ShardStorage._check_dtypes_of_segments
    must be cast | promises/test_guards::test_flattened_parameters_are_cast_together | promises/test_guards::test_flattened_parameters_are_cast_together
storage/sharded_params.py::ShardedParam._hooked
    gets the reduced gradient | promises/test_unnoticed::test_hooks_on_flat_parameters_run_and_those_that_cannot_are_refused | promises/test_unnoticed::test_hooks_on_sharded_parameters_run_on_reduced_gradients
optim/eight_bit/adamw8bit.py::AdamW8bit._check_group
     | optim/eight_bit/test_adamw8bit::test_what_it_cannot_update_is_refused_with_all_names_on_every_rank | optim/eight_bit/test_adamw8bit::test_every_mesh_has_the_same_bits
optim/eight_bit/adamw8bit.py::AdamW8bit._join
     | optim/eight_bit/test_adamw8bit::test_what_it_cannot_update_is_refused_with_all_names_on_every_rank | optim/eight_bit/test_adamw8bit::test_state_of_adamw_is_loaded_as_it_is_and_the_other_way_round
optim/eight_bit/adamw8bit.py::AdamW8bit.step
    cannot be captured | promises/test_guards::test_what_counts_on_the_host_is_refused_within_a_capture | optim/eight_bit/test_adamw8bit::test_every_mesh_has_the_same_bits
optim/eight_bit/strips.py::_OneShard.__init__
    fill a range of memory | promises/test_guards::test_blocks_are_ranges_of_memory | promises/test_guards::test_blocks_are_ranges_of_memory
optim/ema.py::EMA._check_params
     | optim/test_ema::test_mistakes_are_named_with_their_remedy | optim/test_ema::test_averages_of_16_bits_are_kept_in_32_and_tensors_stay_sharded
optim/ema.py::EMA.update
    within EMA.averaged | optim/test_ema::test_averages_are_those_of_the_whole_parameters_and_are_loaded_on_other_ranks | optim/test_ema::test_averages_are_those_of_the_whole_parameters_and_are_loaded_on_other_ranks
    cannot be captured | promises/test_guards::test_what_counts_on_the_host_is_refused_within_a_capture | optim/test_ema::test_averages_are_those_of_the_whole_parameters_and_are_loaded_on_other_ranks
optim/ema.py::EMA.averaged
    is active already | promises/test_guards::test_averages_replace_parameters_once | optim/test_ema::test_averages_are_those_of_the_whole_parameters_and_are_loaded_on_other_ranks
optim/ema.py::EMA.load_state_dict
     | optim/test_ema::test_mistakes_are_named_with_their_remedy | optim/test_ema::test_averages_are_those_of_the_whole_parameters_and_are_loaded_on_other_ranks
optim/fused_shards.py::UpdatedTensor.check_state
    like the parameter or one number | optim/test_optim::test_a_broken_promise_is_told | optim/test_optim::test_every_optimizer_of_torch_does_the_same
optim/fused_shards.py::FusedShard.fuse_states
    Load full tensors | optim/test_optim::test_whole_states_are_not_taken_for_sharded_ones | optim/test_optim::test_checkpoints_of_other_numbers_of_ranks_load
optim/fused_shards.py::check_shards
    has its full parameters now | optim/test_optim::test_whole_parameters_are_not_optimized | optim/test_optim::test_so_it_does_in_the_wrapper
    must have the parameters that are on | optim/test_optim::test_parameters_that_were_replaced_are_not_optimized | optim/test_optim::test_parameters_that_stay_gathered_are_gathered_again
optim/matrices/muon.py::Muon._check_params
     | optim/matrices/test_muon::test_what_it_cannot_update_is_refused_with_all_names_on_every_rank | optim/matrices/test_muon::test_convolutions_embeddings_and_output_layers_are_adamw_s
optim/matrices/muon.py::Muon._check_states
     | optim/matrices/test_muon::test_what_it_cannot_update_is_refused_with_all_names_on_every_rank | optim/matrices/test_muon::test_options_and_state_dicts_are_those_of_torch_s_muon
optim/matrices/muon.py::Muon._check_capture
    counts on the host | gpu/test_optimizer_collectives::test_a_first_step_of_muon_and_one_that_counts_on_the_host_are_not_captured | gpu/test_optimizer_collectives::test_muon_is_captured_with_nccl
    The first step of Muon | gpu/test_optimizer_collectives::test_a_first_step_of_muon_and_one_that_counts_on_the_host_are_not_captured | gpu/test_optimizer_collectives::test_muon_is_captured_with_nccl
optim/param_cuts.py::param_cuts
    with their own shapes | optim/matrices/test_muon::test_what_it_cannot_update_is_refused_with_all_names_on_every_rank | optim/matrices/test_muon::test_a_run_goes_on_over_other_ranks_and_by_the_other_api
optim/param_cuts.py::cuts_of_members
    which elements of the whole parameter | promises/test_guards::test_blocks_are_ranges_of_memory | optim/eight_bit/test_adamw8bit::test_state_dicts_of_both_apis_and_torch_s_checkpoints_hold_it
optim/param_cuts.py::check_backend
    has no backend | optim/test_shard_over_replicas::test_other_optimizers_and_replicas_that_differ_are_refused_alike_on_every_rank | optim/test_shard_over_replicas::test_twenty_steps_give_the_same_bits_with_half_of_the_state
optim/param_cuts.py::refuse_sparse_gradients
     | optim/matrices/test_muon::test_what_it_cannot_update_is_refused_with_all_names_on_every_rank | optim/matrices/test_muon::test_missing_zero_and_nan_gradients_do_what_is_documented_on_every_rank
optim/replica_messages.py::raise_differences
     | optim/test_shard_over_replicas::test_other_optimizers_and_replicas_that_differ_are_refused_alike_on_every_rank | optim/test_shard_over_replicas::test_holes_tools_and_changes_work_as_with_the_usual_optimizer
optim/sharded_optimizer.py::ShardedOptimizer._fuse
    The first step of a ShardedOptimizer | promises/test_guards::test_what_counts_on_the_host_is_refused_within_a_capture | features/graphs/test_graphed::test_the_numbers_of_a_fused_state_stay_where_they_are_when_it_is_read
optim/sharded_optimizer.py::ShardedOptimizer.__getstate__
    cannot be copied or pickled | optim/test_optim::test_copies_are_refused | optim/test_optim::test_state_dicts_are_those_of_the_optimizer_itself
optim/sharded_optimizer.py::_check_class
    updates shards by itself | optim/test_shard_over_replicas::test_other_optimizers_and_replicas_that_differ_are_refused_alike_on_every_rank | optim/test_optim::test_every_optimizer_of_torch_does_the_same
    must depend on this element | optim/test_optim::test_optimizers_that_may_not_be_elementwise_are_refused | optim/test_optim::test_every_optimizer_of_torch_does_the_same
checkpoint/sources/huggingface.py::_renamed
    every weight a different name | checkpoint/sources/test_huggingface::test_damage_and_wrong_options_are_said_before_anything_is_written | checkpoint/sources/test_huggingface::test_floating_point_numbers_are_cast_and_weights_renamed
checkpoint/state/local_state.py::_members
    also tensor-parallel | promises/test_guards::test_flat_pieces_of_parallel_parameters_are_not_saved | promises/test_guards::test_flat_pieces_of_parallel_parameters_are_not_saved
checkpoint/state/optimizer_local_state.py::_averages
    Within EMA.averaged | optim/test_ema::test_mistakes_are_named_with_their_remedy | optim/test_ema::test_averages_are_those_of_the_whole_parameters_and_are_loaded_on_other_ranks
checkpoint/folders/publication.py::latest
    is skipped | checkpoint/test_transient_errors::test_whichever_call_fails_once_the_newest_is_found | checkpoint/folders/test_publication::test_the_newest_is_what_was_written_last
checkpoint/rank_group.py::RankGroup.__init__
    must be in process_group | promises/test_guards::test_ranks_outside_of_a_group_do_not_save_with_it | checkpoint/test_rank_group::test_a_group_of_some_ranks
checkpoint/folders/replacement.py::_empty_old
    may be left in | checkpoint/sources/test_huggingface::test_what_cannot_be_moved_out_of_the_old_folder_is_left_and_said | checkpoint/sources/test_huggingface::test_what_others_write_while_weights_are_replaced_stays
checkpoint/folders/retention.py::remove_old_checkpoints
    No old checkpoint in | checkpoint/test_transient_errors::test_what_cannot_be_read_for_a_while_is_not_outnumbered | checkpoint/test_save::test_the_last_ones_are_kept
    cannot be removed, and stays | checkpoint/folders/test_retention::test_what_cannot_be_removed_stays_with_a_warning | checkpoint/test_save::test_the_last_ones_are_kept
checkpoint/sources/torch_files.py::_storable
    left out of | checkpoint/sources/test_torch_files::test_what_a_checkpoint_cannot_hold_is_left_out_with_a_warning | checkpoint/sources/test_torch_files::test_what_a_checkpoint_cannot_hold_is_left_out_with_a_warning
drop_in/install.py::_refuse_torch_models
    Install first | drop_in/test_install::test_models_and_subclasses_that_exist_are_named | drop_in/test_install::test_torch_trains_with_the_same_bits_after_fullshard_was_installed
drop_in/install.py::_warn_of_subclasses
    They still use torch's FSDP | drop_in/test_install::test_models_and_subclasses_that_exist_are_named | drop_in/test_install::test_all_public_names_of_torch_are_rebound_and_its_engine_is_left_alone
drop_in/install.py::_warn_of_patched
    They are left alone | drop_in/test_install::test_a_patch_that_ends_after_uninstall_is_told_and_undone | drop_in/test_install::test_a_patch_that_ends_before_uninstall_or_never_is_left_alone
drop_in/install.py::_warn_of_models
    They keep working | drop_in/test_install::test_models_and_subclasses_that_exist_are_named | drop_in/test_install::test_models_and_subclasses_that_exist_are_named
tracing/group_facts.py::outermost_states
    Only a sharded model has groups | promises/test_tracing::test_what_cannot_be_recorded_is_refused | promises/test_tracing::test_several_models_have_names_of_their_own
tracing/trace.py::Recording.__init__
    A recording is of one device | promises/test_tracing::test_what_cannot_be_recorded_is_refused | promises/test_tracing::test_several_models_have_names_of_their_own
tracing/trace.py::Recording.__enter__
    one recording at a time | promises/test_tracing::test_what_cannot_be_recorded_is_refused | promises/test_tracing::test_several_models_have_names_of_their_own
tracing/trace.py::Recording.step
    only be recorded within | promises/test_tracing::test_what_cannot_be_recorded_is_refused | promises/test_tracing::test_no_more_than_allowed_is_kept
tracing/trace.py::Recording.paused
    only be paused within | promises/test_tracing::test_what_cannot_be_recorded_is_refused | promises/test_tracing::test_what_happens_in_a_pause_is_in_no_step
tracing/trace.py::Recording.__exit__
    must keep its streams | promises/test_tracing::test_a_part_of_a_model_that_has_not_run_cannot_be_recorded | promises/test_tracing::test_the_first_forward_can_be_recorded
sharded_grad_scaler.py::ShardedGradScaler._group
    there is no default one | test_sharded_grad_scaler::test_the_default_group_may_come_after_the_scaler | test_sharded_grad_scaler::test_a_disabled_scaler_does_nothing_and_communicates_nothing
wrap.py::_check_not_wrapped
    With a policy, no module | test_wrap::test_modules_that_are_wrapped_already_are_refused_by_name | test_wrap::test_the_modules_are_those_that_torch_wraps
wrap.py::enable_wrap
    cannot be nested | test_wrap::test_contexts_cannot_be_nested_and_the_outer_one_stays | test_wrap::test_wrap_wraps_within_the_context_only
"""

ARGUMENTS_TABLE = """
fsdp1/comm_hooks.py::register | hook must be callable
fsdp1/state_dicts/optimizer_params.py::listing_of
fsdp1/state_dicts/settings.py::set_settings
fsdp1/summon_full_params.py::summon_full_params | With rank0_only=True only
fsdp1/summon_full_params.py::_check_full_gradients | exclude each other
fsdp1/wrapper_options.py::read_options | must be a function of a module
fsdp1/wrapper_options.py::choose_axes
fsdp1/wrapper_options.py::_axes_of_mesh
fsdp1/wrapper_options.py::_axes_of_groups
fsdp1/wrapper_options.py::_check_groups
fsdp1/wrapper_options.py::_device_of
fsdp1/wrapper_options.py::choose_ignored | got both
fsdp1/wrapper_options.py::_checked_items
fsdp2/fsdp_module.py::FSDPModule.set_symm_mem_for_comm
fsdp2/fsdp_module.py::FSDPModule.set_all_reduce_hook | hook must be callable
fsdp2/fsdp_module.py::FSDPModule.set_gradient_divide_factor
fsdp2/fsdp_module.py::FSDPModule.set_reduce_scatter_max_input_buffers
fsdp2/fsdp_module.py::register_fsdp_forward_method
fsdp2/fsdp_module.py::_sharded_states
fsdp2/fully_shard.py::_checked_modules | takes an nn.Module or
fsdp2/fully_shard.py::_checked_params
fsdp2/fully_shard.py::_read_reshard_after_forward | must be True, False, None
fsdp2/fully_shard.py::_checked_mesh_info
features/clip_grad.py::Clipping.__init__
features/clip_grad.py::Clipping.clip
features/clip_grad.py::_params_of | takes a module
features/graphs/graphed_step.py::_check_arguments
features/graphs/graphed_step.py::GraphedStep._entry_of | cannot take these inputs
features/group_units.py::GroupingOptions.check | min_bytes and max_bytes
features/group_units.py::GroupingOptions.check | keep_with_parent takes
divergence/guarded_step.py::guarded_step
engine/options.py::StateOptions.set_reshard_after_forward
engine/options.py::StateOptions.set_post_optim_event
transport/staged.py::_checked
checks/debug.py::debug
layout/segments.py::per_row_layout
layout/segments.py::flat_layout
layout/segments.py::_division
layout/segments.py::_check_world
mesh/axes.py::DataParallelMeshInfo.__post_init__
mesh/axes.py::FSDPMeshInfo.__post_init__
mesh/axes.py::DDPMeshInfo.__post_init__
mesh/axes.py::sharding_mesh_info
mesh/axes.py::replicating_mesh_info
mesh/axes.py::check_mesh | must be a torch.distributed
mesh/axes.py::_info_of_named_axes
policies.py::DataParallelMeshDims.__post_init__
policies.py::MixedPrecisionPolicy.__post_init__
policies.py::MixedPrecisionPolicy.overrides
policies.py::check_wire_dtype
policies.py::switch
policies.py::check_type
policies.py::check_floating_dtype
storage/param.py::normalized_shard_dim
optim/eight_bit/adamw8bit.py::AdamW8bit.__init__
optim/eight_bit/adamw8bit.py::AdamW8bit._check_options
optim/ema.py::EMA.__init__
optim/matrices/muon.py::_check_options
optim/replica_messages.py::check_bucket
optim/sharded_optimizer.py::_check_options
checkpoint/sources/conversion.py::write
checkpoint/sources/huggingface.py::_Options.__post_init__
checkpoint/sources/huggingface.py::_companions.check
checkpoint/save.py::async_save
checkpoint/save_plan.py::_collect
tracing/trace.py::trace
api.py::_check_classes
files.py::local_path
sharded_grad_scaler.py::ShardedGradScaler.__init__
sharded_grad_scaler.py::ShardedGradScaler.scale
wrap.py::CustomPolicy.__init__
wrap.py::CustomPolicy.__call__
wrap.py::CustomPolicy._run_policy
wrap.py::enable_wrap | wrapper_cls must be
wrap.py::_check_not_iterator
wrap.py::_classes
wrap.py::_check_policy
wrap.py::_check_kwargs
"""


def guards() -> Iterator[Guard]:
    function = ""
    for line in TABLE.splitlines():
        if not line.startswith(" "):
            function = line
        else:
            says, refuses, lets_through = (cell.strip() for cell in line.split(" | "))
            yield Guard(function, says, refuses, lets_through)


GUARDS = tuple(guards())
ARGUMENTS = [
    (function, says)
    for function, _, says in (
        line.partition(" | ") for line in ARGUMENTS_TABLE.splitlines() if line
    )
]


def matching(place: Place) -> list[object]:
    return [
        *(guard for guard in GUARDS if guard.judges(place)),
        *(
            (function, says)
            for function, says in ARGUMENTS
            if place.function == function and says in place.text
        ),
    ]


def test_every_error_and_warning_is_in_the_table_once():
    wrong = {place: len(found) for place in places() if len(found := matching(place)) != 1}
    assert not wrong, "\n".join(
        f"{place.function} says {place.text[:90]!r}: in {number} rows"
        for place, number in wrong.items()
    )


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: f"{guard.function} {guard.says}")
def test_a_guard_is_there_and_both_of_its_sides_are_tested(guard: Guard):
    assert any(map(guard.judges, places())), "nothing in the source says so"
    for named in (guard.refuses, guard.lets_through):
        path, _, name = named.partition("::")
        assert name in _tests_in(f"{path}.py"), f"there is no test {named}"


def test_every_check_of_arguments_is_there():
    for function, says in ARGUMENTS:
        assert any(p.function == function and says in p.text for p in places()), (function, says)


@cache
def _tests_in(path: str) -> frozenset[str]:
    body = ast.parse((TESTS / path).read_text()).body
    return frozenset(
        each.name
        for each in body
        if isinstance(each, ast.FunctionDef) and each.name.startswith("test_")
    )


# --- sides that no other test has ---------------------------------------------------------------------


def trained_model() -> nn.Module:
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    model(torch.randn(2, 4)).sum().backward()
    return model


def test_what_counts_on_the_host_is_refused_within_a_capture(monkeypatch: pytest.MonkeyPatch):
    with fake_world(2):
        model = trained_model()
        params = list(model.parameters())
        split = ShardedOptimizer(torch.optim.SGD, params, lr=0.1, momentum=0.9)
        split.step()
        split.state_dict()
        calls = [
            AdamW8bit(params).step,
            split.step,
            EMA(model).update,
            lambda: clip_grad_norm_(model, 1.0, error_if_nonfinite=True),
        ]
        with monkeypatch.context() as capture:
            for module in (adamw8bit, sharded_optimizer, ema, clip_grad):
                capture.setattr(module, "is_capturing", lambda: True)
            for call in calls:
                with pytest.raises(UsageError, match="captured"):
                    call()
            clip_grad_norm_(model, 1.0)
        for call in calls:
            call()


def test_a_number_that_keeps_gathered_parameters_is_warned_of():
    with fake_world(2), warnings.catch_warnings():
        warnings.simplefilter("error")
        for legal in (None, True, False, 2):
            fully_shard(nn.Linear(2, 2), reshard_after_forward=legal)
        with pytest.raises(UserWarning, match=r"^reshard_after_forward=1 keeps"):
            fully_shard(nn.Linear(2, 2), reshard_after_forward=1)


def test_clipping_without_gradients_is_warned_of():
    with fake_world(2), warnings.catch_warnings():
        warnings.simplefilter("error")
        model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=CPU)
        with pytest.raises(UserWarning, match=r"^clip_grad_norm_ found no gradients"):
            model.clip_grad_norm_(1.0)
        model(torch.randn(2, 4)).sum().backward()
        model.clip_grad_norm_(1.0)


class Channel:
    """To ranks that know of others each time they are asked."""

    def __init__(self) -> None:
        self.known = 0

    def exchange(self, text: str) -> list[str]:
        self.known += 1
        return [json.dumps([self.known])]

    def agree(self, number: int) -> bool:
        return False


def test_process_groups_that_hang_together_in_no_order_are_refused():
    link: Any = SimpleNamespace(journal=SimpleNamespace(ranks=(0, 1)), channel=Channel())
    with pytest.raises(ConfigurationError, match="needs process groups that form a mesh"):
        step_guard._link_to_all([link])


def test_optimizers_of_other_models_are_refused():
    with fake_world(2):
        net = nn.Linear(4, 4)
        model = FullyShardedDataParallel(net, device_id=CPU, use_orig_params=True)
        by_name = OptimStateKeyType.PARAM_NAME
        own, other = (
            torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, nn.Linear(4, 4))
        )
        state_dict = own.state_dict()
        FullyShardedDataParallel.rekey_optim_state_dict(state_dict, by_name, model, optim=own)
        with pytest.raises(ConfigurationError, match="must be parameters of the model"):
            FullyShardedDataParallel.rekey_optim_state_dict(state_dict, by_name, model, optim=other)


def test_a_wrapped_module_on_two_devices_is_refused():
    first, second, host = (
        cast(nn.Parameter, SimpleNamespace(device=torch.device(name)))
        for name in ("xpu:0", "xpu:1", "cpu")
    )
    with fake_world(2):
        axes: Any = SimpleNamespace(
            shard_process_group=dist.group.WORLD, replicate_process_group=None
        )
        with pytest.raises(ConfigurationError, match="must be on one device"):
            choose_device(None, [first, second, host], axes)
        with pytest.raises(ConfigurationError, match="but the module is on xpu:0"):
            choose_device(CPU, [first, host], axes)
        assert choose_device(None, [first, host], axes) == first.device
        assert choose_device(CPU, [host], axes) == CPU


def test_what_the_first_forward_decides_is_not_told_before():
    with fake_world(2):
        model = fully_shard(nn.Sequential(nn.Linear(4, 4)), fuse_gradients=True)
        with pytest.raises(LifecycleError, match="first forward of the model decides"):
            model.fused_gradients()
        model(torch.randn(2, 4))
        model.fused_gradients()


def test_flattened_parameters_are_cast_together():
    with fake_world(2):
        model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=CPU, use_orig_params=True)
        weight = model.module.weight
        weight.data = weight.data.bfloat16()
        with pytest.raises(ConfigurationError, match="must be cast together"):
            model(torch.randn(2, 4))
        model.bfloat16()
        model(torch.randn(2, 4, dtype=torch.bfloat16)).sum().backward()


def test_averages_replace_parameters_once():
    with fake_world(2):
        averages = EMA(trained_model())
        with averages.averaged(), pytest.raises(LifecycleError, match="is active already"):
            averages.averaged().__enter__()
        with averages.averaged():
            pass


def test_blocks_are_ranges_of_memory(monkeypatch: pytest.MonkeyPatch):
    holes = nn.Parameter(torch.zeros(4, 4)[:, ::2])
    with pytest.raises(UnsupportedError, match="fill a range of memory"):
        block_strips._OneShard(holes, "weight")
    block_strips._OneShard(nn.Parameter(torch.zeros(4, 2).t()), "weight")
    cuts_of_members([holes])
    monkeypatch.setattr(
        sys.modules[cuts_of_members.__module__], "_flat_and_parallel", lambda _: ["w"]
    )
    with pytest.raises(
        UnsupportedError, match=r"these of wrappers are also tensor-parallel: \['w'\]"
    ):
        cuts_of_members([holes])


def test_ranks_outside_of_a_group_do_not_save_with_it(tmp_path: Path) -> None:
    with fake_world(3):
        model = fully_shard(nn.Linear(4, 4))
        of_others: Any = dist.new_group([1, 2])
        with pytest.raises(ConfigurationError, match=r"must be in process_group; rank 0 is not"):
            checkpoint.save(tmp_path / "saved", model, process_group=of_others)
    assert list(tmp_path.iterdir()) == []


def test_flat_pieces_of_parallel_parameters_are_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(2):
        model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=CPU, use_orig_params=True)
        LocalModelState(model, "save")
        for param in params_of(model):
            monkeypatch.setattr(param, "placement", SimpleNamespace(parallel=True))
        with pytest.raises(UnsupportedError, match=r"wrappers are: \['weight', 'bias'\]"):
            LocalModelState(model, "save")


def params_of(model: Any) -> list[Any]:
    return [
        param
        for state, _, _ in states_in(model)
        for group in state.groups
        for param in group.params
    ]
