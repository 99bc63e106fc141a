"""The border to torch: every touch of a private torch name, and every difference between torch versions.

It may import nothing else of fullshard.
It owns how torch spells what it does not promise: when a torch release moves something, only this folder changes.

Users of it write ``torch_border.name``, whichever file has the name.
"""

from fullshard.torch_border.autograd import (
    NO_RANGE as NO_RANGE,
    REDUCES_IN_GRAD_DTYPE as REDUCES_IN_GRAD_DTYPE,
    backward_pass_id as backward_pass_id,
    below_autograd as below_autograd,
    dtypes_of as dtypes_of,
    hook_gradient as hook_gradient,
    inputs_of_backward as inputs_of_backward,
    is_autocast_on as is_autocast_on,
    move_hooks as move_hooks,
    observe_backward as observe_backward,
    pass_accumulates as pass_accumulates,
    pass_executes as pass_executes,
    plain_attributes as plain_attributes,
    post_accumulate_grad_hooks as post_accumulate_grad_hooks,
    profiler_enabled as profiler_enabled,
    profiler_range as profiler_range,
    queue_end_of_backward as queue_end_of_backward,
    set_versions as set_versions,
    sum_of_versions as sum_of_versions,
    tensor_hooks as tensor_hooks,
    version_found as version_found,
    version_of as version_of,
    versions_kept as versions_kept,
    versions_of as versions_of,
    with_inputs_of_backward as with_inputs_of_backward,
)
from fullshard.torch_border.client_attributes import (
    ClientAttributes as ClientAttributes,
    composable_functions as composable_functions,
    mark_flat_parameter as mark_flat_parameter,
    mark_flattened as mark_flattened,
    register_composable as register_composable,
    show_state as show_state,
)
from fullshard.torch_border.compiled_kernels import (
    CompiledKernel as CompiledKernel,
    Repeat as Repeat,
)
from fullshard.torch_border.compiler import (
    opaque_to_compiler as opaque_to_compiler,
    show_alone as show_alone,
)
from fullshard.torch_border.devices import (
    Device as Device,
    NoteKernel as NoteKernel,
    current_stream as current_stream,
    device_for as device_for,
    device_instead as device_instead,
)
from fullshard.torch_border.dtensors import (
    dtensor as dtensor,
    dtensor_parameter as dtensor_parameter,
    dtensor_spec as dtensor_spec,
    flat_mesh as flat_mesh,
    joined_mesh as joined_mesh,
    like_param as like_param,
    local_gradients_of as local_gradients_of,
    local_lists as local_lists,
    local_of as local_of,
    locals_of as locals_of,
    redistributed_local as redistributed_local,
    replace_local as replace_local,
    sharded_dim as sharded_dim,
    spec_of as spec_of,
    split_factor as split_factor,
    strided_shard as strided_shard,
)
from fullshard.torch_border.gpu_events import heard_gpu_events as heard_gpu_events
from fullshard.torch_border.graphs import (
    keep_gpu_busy as keep_gpu_busy,
    mend_after_failed_capture as mend_after_failed_capture,
    pool_bytes as pool_bytes,
)
from fullshard.torch_border.modules import (
    ACTIVATION_CHECKPOINTED as ACTIVATION_CHECKPOINTED,
    COMPILED as COMPILED,
    EXTRA_STATE as EXTRA_STATE,
    BatchNorm as BatchNorm,
    ConvertibleModule as ConvertibleModule,
    child_table as child_table,
    dcp_item_place as dcp_item_place,
    is_compiled as is_compiled,
    is_sharded_by_torch as is_sharded_by_torch,
    module_versions as module_versions,
    names_in_modules as names_in_modules,
    num_running as num_running,
    parameter_table as parameter_table,
    persistent_buffers as persistent_buffers,
    table_for as table_for,
    with_module_versions as with_module_versions,
    without_activation_wrapper as without_activation_wrapper,
    without_wrappers as without_wrappers,
)
from fullshard.torch_border.operators import (
    ADDMM_WITH_ACTIVATION as ADDMM_WITH_ACTIVATION,
    ATTENTION_OPERATORS as ATTENTION_OPERATORS,
    SET_STORAGE as SET_STORAGE,
    VALUE_OF as VALUE_OF,
    Argument as Argument,
    Operator as Operator,
    OperatorMode as OperatorMode,
    Signature as Signature,
    flash_attention as flash_attention,
    leaves_in as leaves_in,
    memory_efficient_attention as memory_efficient_attention,
    signature_of as signature_of,
    takes_itself_apart as takes_itself_apart,
    with_tensors as with_tensors,
    without_function_modes as without_function_modes,
)
from fullshard.torch_border.optimizers import (
    ELEMENTWISE as ELEMENTWISE,
    IN_BACKWARD_OPTIMIZERS as IN_BACKWARD_OPTIMIZERS,
    DelegatingOptimizer as DelegatingOptimizer,
    OpenGradScaler as OpenGradScaler,
    observe_updates as observe_updates,
    observe_zero_grad as observe_zero_grad,
    step_pre_hooks as step_pre_hooks,
    unscale_and_check as unscale_and_check,
)
from fullshard.torch_border.pipelining import (
    observe_stages as observe_stages,
    pipelining_is_imported as pipelining_is_imported,
)
from fullshard.torch_border.process_groups import (
    abort_of as abort_of,
    all_gather_coalesced as all_gather_coalesced,
    all_gather_options as all_gather_options,
    all_gather_single as all_gather_single,
    all_groups as all_groups,
    all_to_all_options as all_to_all_options,
    all_to_all_single as all_to_all_single,
    allocate_tensor as allocate_tensor,
    allocates_tensors as allocates_tensors,
    arrived as arrived,
    before_shutdown as before_shutdown,
    choose_symmetric_backend as choose_symmetric_backend,
    default_store as default_store,
    exists as exists,
    fake_process_group as fake_process_group,
    is_observed_wait as is_observed_wait,
    observe_waits as observe_waits,
    operation_waited_for as operation_waited_for,
    own_client as own_client,
    own_store_client as own_store_client,
    pending_in_backend as pending_in_backend,
    reduce_scatter_coalesced as reduce_scatter_coalesced,
    reduce_scatter_options as reduce_scatter_options,
    reduce_scatter_single as reduce_scatter_single,
    set_timeout as set_timeout,
    store_host as store_host,
    store_of as store_of,
    store_port as store_port,
    symmetric_bytes as symmetric_bytes,
    timeout_of as timeout_of,
)
from fullshard.torch_border.sharded_tensors import (
    ShardedTensorParts as ShardedTensorParts,
    is_sharded_tensor as is_sharded_tensor,
    local_sharded_tensor as local_sharded_tensor,
    parts_of_sharded_tensor as parts_of_sharded_tensor,
    sharded_tensor as sharded_tensor,
)
from fullshard.torch_border.state_dict_functions import (
    StateDictWrapper as StateDictWrapper,
    introduce_wrapper as introduce_wrapper,
)
from fullshard.torch_border.tensors import (
    address_of as address_of,
    addresses_of as addresses_of,
    base_of as base_of,
    current_stream_id as current_stream_id,
    id_of_storage as id_of_storage,
    parameter_of_class as parameter_of_class,
    same_memory as same_memory,
    sparse_values as sparse_values,
    storage_id as storage_id,
    tensor_without_memory as tensor_without_memory,
    with_own_storage as with_own_storage,
)
from fullshard.torch_border.transforms import (
    forward_ad_level as forward_ad_level,
    graph_tensors as graph_tensors,
    innermost_transform as innermost_transform,
    is_batched as is_batched,
    is_wrapped as is_wrapped,
    num_dispatch_modes as num_dispatch_modes,
    outside_checkpoints as outside_checkpoints,
    outside_transforms as outside_transforms,
    plain_parts as plain_parts,
    with_tangent as with_tangent,
)
