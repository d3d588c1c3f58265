"""The options and the table of `streamgrad check`. The comparison is in `streamgrad.precision`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from streamgrad.cli import CheckFailed
from streamgrad.hf.presets import check_found

if TYPE_CHECKING:
    from streamgrad.precision import Outcome


def check(
    model: Annotated[str, typer.Argument(help="A preset (qwen3-8b), a directory with a config.json, or a name on the hub.")],
    device: Annotated[str | None, typer.Option(help="cuda or cpu.", show_default="cuda if there is one, else cpu")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON instead of a table.")] = False,
) -> None:
    """Check that gradients are exact for this class of model on this machine: the paper's table of gradient precision.

    Small random copies of the model (its class and flags, a few narrow layers) are differentiated with and without streaming, in
    fp32 and bfloat16. Only the configuration is read. This takes seconds on a GPU and one or two minutes on a core of a CPU, and
    exits with 1 if a gradient is less exact than plain backpropagation's or the model cannot be streamed.

    **Examples**

    `python -m streamgrad check qwen3-8b`

    `python -m streamgrad check ./my-model --json`
    """
    check_found(model)
    with Console(stderr=True).status("Loading torch and transformers ...") as status:
        # Imported here, so that `--help` and a wrong name need not wait for them.
        import torch

        from streamgrad.cli.chosen_device import chosen_device
        from streamgrad.hf.configs import config_of
        from streamgrad.hf.discover import find_decoder
        from streamgrad.hf.estimates.dry_run import meta_model
        from streamgrad.precision import LARGEST_ERROR, LARGEST_RATIO, MODELS, check_precision

        config, target = config_of(model), chosen_device(device)
        find_decoder(meta_model(config, dtype=torch.bfloat16))  # which refuses what the sizes of a small copy would hide

        def tell(done: int, total: int) -> None:
            more = "; the noise of 16 bits asks for more" if total > MODELS else ""
            status.update(f"{done}/{total} small copies of the model compared on {target.type}{more} ...")

        outcome = check_precision(config, device=target, progress=tell)
    if as_json:
        typer.echo(json.dumps({"model": model} | outcome.to_dict(), indent=2))
    else:
        console = Console()
        console.print(check_table(model, outcome))
        console.print(
            f"Exact. fp32: every group within {LARGEST_ERROR:.0e} of plain backpropagation's. {outcome.dtype}: streamed errors "
            f"are {outcome.ratio:.3f} times plain ones, pooled over {outcome.models} random models; {LARGEST_RATIO} is allowed."
            if outcome.passed
            else "[bold red]Not exact.[/bold red]"
        )
    if not outcome.passed:
        raise CheckFailed(f"{outcome.model_class} on {outcome.device}: " + "; ".join(outcome.failures))


def check_table(model: str, outcome: Outcome) -> Table:
    """Return a row per group of modules: absolute and relative errors against plain backpropagation in fp32."""
    from streamgrad.precision import KINDS

    title = (
        f"{model}: gradients of {outcome.model_class}, {outcome.layers} layers, {outcome.tokens} tokens in chunks of "
        f"{outcome.chunk_size}, {outcome.device}, against plain fp32"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for measure in ("absolute", "relative"):
        for kind in KINDS:
            table.add_column(f"{kind}\n{measure}", justify="right")
    for group, row in outcome.table.items():
        errors = [row[kind].absolute for kind in KINDS] + [row[kind].relative for kind in KINDS]
        table.add_row(group, *(f"{error:.2e}" for error in errors))
    return table
