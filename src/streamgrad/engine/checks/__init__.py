"""What is asked of a layer before and while it is streamed, so that its gradients are exact or it is refused.

- Before its first step in chunks: `trial` (with `trial_draws`, `module_state`), once for what `contents` tells apart.
- In its first run: `first_run`, `value_choices`.
- In every step: `guards`, `kept_graphs`, `in_use`.
"""
