"""What a command gives to its trainer beside a model and a dataset: rewards if it samples, a teacher if it distils."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import trl.rewards

from streamgrad.hf.configs import stored_config


def rewards(objective: str, script: Any, otherwise: list[Any] | None) -> dict[str, Any]:
    """Return the rewards that the arguments of TRL's `script` name: a reward model, functions of `trl.rewards`, dotted paths.

    `otherwise` are used if there is none.
    """
    model = script.reward_model_name_or_path
    found = [*([model] if model else []), *(_reward(name) for name in script.reward_funcs or [])] or otherwise
    if not found:
        raise ValueError(f"{objective} needs a reward. Pass --reward_funcs my_module.my_reward, or --reward_model_name_or_path.")
    return {"reward_funcs": found}


def teacher(objective: str, training: Any, model_options: dict[str, Any]) -> dict[str, Any]:
    """Return the teacher, and let it be loaded as TRL's script does: as the student, but at a revision of its own.

    It is not quantised along with the student.
    """
    name = training.teacher_model_name_or_path
    if name is None:
        raise ValueError(f"{objective} needs a teacher. Pass --teacher_model_name_or_path, with the same vocabulary.")
    own = {"revision": training.teacher_model_revision, "trust_remote_code": training.trust_remote_code}
    stored_config(name, **own)
    training.teacher_model_init_kwargs = model_options | own | (training.teacher_model_init_kwargs or {})
    return {"teacher_model": name}


def _reward(name: str) -> Callable[..., Any]:
    if name == "get_soft_overlong_punishment":
        return trl.rewards.get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256)  # as in TRL's script
    module, _, function = name.rpartition(".")
    if not module:
        # What begins with get_ makes a reward, and needs arguments.
        known = [own for own in trl.rewards.__all__ if own.endswith("_reward") and not own.startswith("get_")]
        if name not in known:
            named = ", ".join([*known, "get_soft_overlong_punishment"])
            raise ValueError(f"the reward {name!r} is not one of TRL's ({named}). Pass one of them, or a path, module.function.")
        return getattr(trl.rewards, name)
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"the reward {name!r} could not be imported: {error}.") from error
    finally:
        sys.path.remove(os.getcwd())
    if not callable(found):
        raise ValueError(f"the reward {name!r} is a {type(found).__name__}. Pass the path of a function, module.function.")
    return found
