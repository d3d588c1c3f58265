"""What src/ relies on inside torch, transformers, TRL, PEFT, accelerate and DeepSpeed is still there, by name.

A release of theirs may drop a private name (a leading underscore), or a public one that no documentation promises. Code that asks
for it with `getattr(..., None)`, or looks for it in a `__dict__`, would not fail but quietly do something else.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import peft
import pytest
import torch
from packaging.version import Version
from torch import nn
from transformers import LlamaConfig

SOURCE = Path(__file__).parents[2] / "src/streamgrad"
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "deepspeed")

# What TRL calls to generate completions and to score them, which src/ overrides.
_GENERATION = "_generate_single_turn _generate_and_score_completions _prepare_inputs _get_per_token_logps_and_entropies"

# Private names that src/ uses, by where they are. A file is named for what its code sets at run time.
PRIVATE = {
    "torch": "_C _dynamo _foreach_norm _foreach_sub _functorch _subclasses",
    "torch.Tensor": "_backward_hooks _is_view _make_wrapper_subclass _post_accumulate_grad_hooks _version",
    "torch.UntypedStorage": "_cdata",
    "torch._C": """
        _autograd _current_graph_task_id _disabled_torch_function_impl _dynamo _functorch _len_torch_dispatch_stack
        _len_torch_function_stack _nn _set_throw_on_mutable_data_ptr _will_engine_execute_node
    """,
    "torch._C._autograd": "_get_current_graph_task_keep_graph _top_saved_tensors_default_hooks",
    "torch.autograd.Variable": "_execution_engine",
    "torch.autograd.forward_ad": "_current_level",
    "torch.autograd.graph": "_engine_run_backward",
    "torch.cuda.memory": "_record_memory_history _set_memory_metadata _snapshot",
    "torch.distributed.ProcessGroup": "_device_types _get_backend",
    "torch._C._distributed_c10d.Backend.Options": "_timeout",
    "torch.distributed.distributed_c10d": "_get_default_store _world",
    "torch.distributed.fsdp.FSDPModule": "_get_fsdp_state",
    "torch/distributed/fsdp/_fully_shard/_fsdp_param.py": "_sharded_local_tensor _sharded_param_data _unsharded_param",
    "torch/distributed/fsdp/_fully_shard/_fsdp_state.py": "_fsdp_param_group _fsdp_param_groups _pre_forward_hook_handle",
    "torch.nn.modules.batchnorm": "_BatchNorm",
    "torch.nn.modules.dropout": "_DropoutNd",
    "torch.nn.modules.module": """
        _global_backward_hooks _global_backward_pre_hooks _global_forward_hooks _global_forward_pre_hooks _has_any_global_hook
    """,
    "torch.nn.utils.parametrize": "_cache_enabled",
    "torch.ops.aten": """
        _efficient_attention_forward _flash_attention_backward _flash_attention_forward _foreach_mul_ _foreach_norm
        _fused_rms_norm _grouped_mm _log_softmax _reshape_alias _scaled_dot_product_attention_math
        _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
        _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
        _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
        _scaled_dot_product_flash_attention_for_cpu_backward _softmax _to_copy _trilinear _unsafe_index
        _unsafe_view
    """,
    "torch.utils": "_python_dispatch _pytree",
    "a module": """
        _backward_hooks _backward_pre_hooks _buffers _call_impl _compiled_call_impl _forward_hooks _forward_hooks_always_called
        _forward_hooks_with_kwargs _forward_pre_hooks _forward_pre_hooks_with_kwargs _modules _parameters
    """,
    "torch/_dynamo/eval_frame.py": "_orig_mod",
    "a configuration": "_attn_implementation _attn_implementation_internal",
    "transformers.PreTrainedModel": "_supports_attention_backend",
    "transformers/modeling_utils.py": "_loss_function",
    "transformers.integrations.moe": "_default_apply_gate _grouped_linear",
    "transformers/integrations/moe.py": "_apply_gate _experts_implementation _is_expert_parallel",
    "transformers.models.gemma.modeling_gemma.GemmaRMSNorm": "_norm",
    "transformers.utils.output_capturing": "_active_collector",
    "transformers/utils/output_capturing.py": "_hidden_states_layers",
    "an adapter": "_active_adapter _disable_adapters",
    "accelerate.state.GradientState": "_shared_state",
    "accelerate/accelerator.py": "_original_forward",
    "accelerate/hooks.py": "_hf_hook",
    "accelerate/state.py": "_mixed_precision",
    "trl/trainer/dpo_trainer.py": "_tp_size",
    "transformers/trainer.py": "_get_dataloader _load_optimizer_and_scheduler",
    "trl/trainer/grpo_trainer.py": f"_buffered_inputs {_GENERATION}",
    "trl/trainer/rloo_trainer.py": f"_buffered_inputs {_GENERATION}",
    "deepspeed.runtime.sequence_parallel.parallel_state_sp": "_SEQUENCE_PARALLEL_GROUP",
    "accelerate.state.AcceleratorState": "_shared_state",
}

# Names without an underscore that are no more promised than those. (What is imported, or read from a module, is found by itself.)
UNDOCUMENTED = {
    "torch._functorch.config": "force_non_lazy_backward_lowering",
    "torch.Tensor": "grad_dtype",
    "torch/distributed/fsdp/_fully_shard/_fsdp_param.py": (
        "offload_to_cpu pin_memory sharded_param sharded_state unsharded_accumulated_grad"
    ),
    "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py": "fsdp_params mesh_info reduce_grads",
    "an adapter": "lora_variant merged_adapters scaling",
    "peft/peft_model.py": "get_base_model",
    "peft/tuners/lora/layer.py": "ParamWrapper get_param",
    "peft/tuners/lily/layer.py": "LilyLayer",
    "peft/tuners/xlora/layer.py": "XLoraLayer",
    "peft/tuners/lora/variants.py": "ALora",
    "peft/utils/other.py": "modules_to_save",
    "deepspeed/runtime/zero/parameter_offload.py": "ds_id",
    "deepspeed/runtime/zero/partition_parameters.py": "ds_id",
    "trl/trainer/sft_trainer.py": "add_fused_lm_head router_aux_loss_coef label_smoother compute_loss_func",
    "trl/trainer/dpo_trainer.py": "add_fused_lm_head router_aux_loss_coef",
    "trl/trainer/grpo_trainer.py": "add_fused_lm_head router_aux_loss_coef num_items_in_batch importance_sampling_ratio",
    "trl/trainer/grpo_config.py": "generation_batch_size steps_per_generation num_generations",
    "transformers/trainer.py": "get_total_train_batch_size",
    "trl/trainer/kto_trainer.py": "add_fused_lm_head router_aux_loss_coef",
    "trl/trainer/distillation_trainer.py": "create_model_from_path",
    "trl/trainer/rloo_trainer.py": "add_fused_lm_head router_aux_loss_coef",
    "trl.trainer.utils.FusedCausalLMOutput": "log_probs entropy log_sum_sq_probs mean_logits is_top1 label_mask loss",
    "accelerate/accelerator.py": "deepspeed_ulysses_dl_adapter parallelism_config",
    "accelerate/parallelism_config.py": "cp_size sp_enabled sp_size",
    "accelerate.state.AcceleratorState": "deepspeed_plugin",
    "accelerate/utils/dataclasses.py": "deepspeed_config",
    "transformers/integrations/deepspeed.py": "mismatches trainer_config_process",
    "transformers/training_args.py": "deepspeed_plugin",
    "deepspeed/runtime/sequence_parallel/ulysses_sp.py": "micro_batches refill",
    "transformers.models.llama.modeling_llama": """
        ALL_ATTENTION_FUNCTIONS apply_rotary_pos_emb eager_attention_forward rotate_half
    """,
    "transformers.PreTrainedModel": "get_decoder loss_function tp_size",
    "transformers/cache_utils.py": "is_recording_past",
    "transformers/modeling_layers.py": "gradient_checkpointing",
    "transformers/integrations/heterogeneity/configuration_utils.py": "is_heterogeneous per_layer_config",
    "transformers/models/gemma4/modeling_gemma4.py": "shared_kv_states",
    "transformers/models/gemma4/configuration_gemma4.py": "num_kv_shared_layers",
}

# Names that older releases of transformers, which are supported too, do without.
SINCE = {
    "_hidden_states_layers": "5.17", "_is_expert_parallel": "5.22", "is_recording_past": "5.21", "shared_kv_states": "5.5.4",
}  # fmt: skip

# Of the standard library and ours.
NOT_THEIRS = {"_actions", "_getframe", "_replace", "_streamgrad"}


def _adapter() -> nn.Module:
    config = peft.LoraConfig(target_modules=["0"])
    return peft.get_peft_model(nn.Sequential(nn.Linear(2, 2)), config).base_model.model[0]


OBJECTS: dict[str, Callable[[], Any]] = {
    "a module": lambda: nn.Linear(2, 2),
    "a configuration": LlamaConfig,
    "an adapter": _adapter,
}


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {str(path.relative_to(SOURCE)): ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


def names_defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node.value) == "self":
            yield node.attr


def names_used(tree: ast.Module) -> Iterator[str]:
    """Yield attributes, imported names, names of arguments, and strings that could be the name of one."""
    pieces_of_text = {id(piece) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for piece in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.keyword):
            yield node.arg or ""
        elif isinstance(node, ast.alias):
            yield from node.name.split(".")
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module or "").split(".")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in pieces_of_text:
            yield node.value


@functools.cache
def uses() -> dict[str, list[str]]:
    """Return the files of ours that use a name."""
    files = defaultdict(list)
    for file, tree in trees().items():
        for name in dict.fromkeys(names_used(tree)):
            files[name].append(file)
    return files


def is_private(name: str) -> bool:
    return name.isidentifier() and name.startswith("_") and not name.startswith("__") and name != "_"


def test_every_private_name_is_listed():
    """A new use of a private name needs a line in PRIVATE, and one that is gone leaves none behind."""
    ours = {name for tree in trees().values() for name in names_defined(tree)}
    found = {name for name in uses() if is_private(name)} - ours - NOT_THEIRS
    listed = {name for names in PRIVATE.values() for name in names.split()}
    assert not found - listed, {name: uses()[name] for name in found - listed}
    others = {name for names in UNDOCUMENTED.values() for name in names.split()}
    stale = (listed | others) - uses().keys() - ours  # which override some
    assert not stale, f"listed, but no longer used: {stale}"


LISTED = [(owner, name) for table in (PRIVATE, UNDOCUMENTED) for owner, names in table.items() for name in names.split()]


@pytest.mark.parametrize(("owner", "name"), LISTED, ids=lambda value: value)
def test_a_listed_name_is_there(owner, name):
    if Version(version("transformers")) < Version(SINCE.get(name, "0")):
        pytest.skip(f"transformers has {name} since {SINCE[name]}, and streamgrad does without it before")
    if owner.endswith(".py"):
        there = name in site_file(owner).read_text()
    else:
        there = hasattr(OBJECTS[owner]() if owner in OBJECTS else resolve_name(owner), name)
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    assert there, f"{owner} has no {name}, which streamgrad/{', '.join(uses()[name])} relies on. Installed: {versions}"


def site_file(path: str) -> Path:
    """Return an installed file without importing it, which takes seconds for some."""
    found = [file for file in (Path(folder) / path for folder in sys.path) if file.exists()]
    assert found, f"{path} is not there any more"
    return found[0]


def imported_from(tree: ast.Module) -> dict[str, str]:
    """Return what a file's names stand for: `module:name` of one of the packages, wherever in the file it is imported."""
    meanings = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in PACKAGES:
                    meanings[alias.asname or alias.name.split(".")[0]] = alias.name if alias.asname else alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            meanings |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return meanings


def dotted(node: ast.expr) -> str:
    """Return `a.b.c` of such an expression, and "" of any other."""
    if isinstance(node, ast.Attribute):
        return f"{before}.{node.attr}" if (before := dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


@functools.cache
def foreign_names() -> dict[str, set[str]]:
    """Return the files of ours by `torch.nn.functional.linear`: every import, and every attribute of what is imported."""
    files = defaultdict(set)
    for file, tree in trees().items():
        meanings = imported_from(tree)
        for meaning in meanings.values():
            files[meaning].add(file)
        for node in ast.walk(tree):
            first, _, rest = dotted(node).partition(".") if isinstance(node, ast.Attribute) else ("", "", "")
            if first in meanings:
                files[f"{meanings[first]}.{rest}"].add(file)
    return files


@pytest.mark.parametrize("package", PACKAGES)
def test_every_imported_name_is_there(package):
    """Also those that are imported where they are needed, and attributes of what is imported."""
    missing = {}
    for name, files in foreign_names().items():
        if name.partition(".")[0] == package:
            try:
                resolve_name(name)
            except (ImportError, AttributeError):
                missing[name] = files
    assert not missing, f"{package} {version(package)} has no longer, though these files of ours use it: {missing}"


def test_only_the_trainers_import_trl():
    files = {file for name, files in foreign_names().items() if name.partition(".")[0] == "trl" for file in files}
    assert files
    assert all(file.startswith("trl/") for file in files), files


def test_a_name_that_is_gone_fails_with_the_file_that_uses_it(monkeypatch):
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    words = r"torch\._C has no _current_graph_task_id, which streamgrad/ops/autograd\.py relies on\. Installed: torch \d"
    with pytest.raises(AssertionError, match=words):
        test_a_listed_name_is_there("torch._C", "_current_graph_task_id")
    with pytest.raises(AssertionError, match=r"torch\._C\._current_graph_task_id': \{'ops/autograd\.py'\}"):
        test_every_imported_name_is_there("torch")


@pytest.mark.parametrize("code", ["x.y._new", "from torch import _new", "import torch._new", "getattr(x, '_new', None)"])
def test_a_new_use_is_found(code):
    assert "_new" in set(names_used(ast.parse(code)))
