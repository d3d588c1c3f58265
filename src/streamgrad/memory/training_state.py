"""What training keeps beside activations, on one GPU and on its host: weights, gradients, optimizer state and engines' copies.

    optimizer      state                      gradients on the GPU
    adamw          two moments on the GPU     all, until the step
    adamw8bit      two bytes a weight         all, until the step
    sgd, none      nothing                    all, until the step
    in-backward    two moments on the GPU     of one unit: stepped and freed as they leave it
    host           on the host                of one unit: they leave for the host

A unit is a layer, the head or the embeddings; the phases of a step (`memory.phases`) have the gradients that each makes. A weight
that head and embeddings share has its gradient when both have: the head's share then waits for the whole backward pass.

With `weights="host"`, layers wait in pinned memory. One is at work and one on its way; embeddings and head stay on the GPU.
Gradients then leave for the host too, whatever the optimizer.
Bytes a rank under each engine are those of `memory.engines`.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamgrad.memory.costs import ModelShape, Parts
from streamgrad.memory.engines import rank_bytes

OPTIMIZERS = ("adamw", "adamw8bit", "sgd", "in-backward", "host", "none")
WEIGHT_PLACES = ("device", "host")
MASTER_DTYPES = ("auto", "bfloat16", "float32")
_ZERO = ("zero1", "zero2", "zero3")


@dataclass(frozen=True)
class Setup:
    """How a model is trained, as far as its state is concerned. Raises `ValueError` for what does not go together."""

    engine: str = "none"
    gpus: int = 1
    optimizer: str = "adamw"
    weights: str = "device"
    master_dtype: str = "auto"
    second_model: bool = False  # frozen, whole, on every GPU

    def __post_init__(self) -> None:
        if self.optimizer == "in-backward" and self.engine != "none":
            raise ValueError(
                f"optimizer='in-backward' with engine={self.engine!r}: gradients are summed over ranks after they leave a layer. "
                "Pass optimizer='host', or engine='none' with gpus=1."
            )
        if self.optimizer == "host" and self.engine == "ddp":
            raise ValueError(
                "optimizer='host' with engine='ddp' keeps a whole optimizer on the host for every GPU. Pass engine='zero2', "
                "which shards it."
            )
        if self.weights == "host" and self.engine in ("ddp", "zero1", "zero2"):
            raise ValueError(
                f"weights='host' with engine={self.engine!r}, which keeps all weights on every GPU. Pass engine='zero3' or "
                "'fsdp2'."
            )
        if self.master_dtype != "auto" and self.engine != "fsdp2":
            raise ValueError(
                f"master_dtype={self.master_dtype!r} is for engine='fsdp2', got engine={self.engine!r}: DeepSpeed steps a copy "
                "in float32, and without an engine weights are what `dtype` says. Leave one of them out."
            )

    def master_size(self, shape: ModelShape) -> int:
        """Return the bytes of a trained weight as the optimizer steps it.

        Accelerate makes FSDP2's trained weights float32 under mixed precision, but for models with weights in 4 bits.
        """
        if self.engine == "fsdp2" and shape.itemsize == 2:
            upcast = not shape.weights_saved if self.master_dtype == "auto" else self.master_dtype == "float32"
            return 4 if upcast else 2
        return 4 if copies_to_fp32(self.engine, shape.itemsize) else shape.itemsize

    @property
    def steps_on_host(self) -> bool:
        """Return whether gradients leave for the host, where the optimizer's states are."""
        return "host" in (self.optimizer, self.weights)

    @property
    def keeps_gradients(self) -> bool:
        """Return whether gradients stay on the GPU until the optimizer's step."""
        return self.optimizer != "in-backward" and not self.steps_on_host


@dataclass(frozen=True)
class TrainingState:
    """What stays on one GPU and on its host for the whole step, and the part of finished gradients that stays on the GPU."""

    device: Parts
    host: Parts
    gradient_share: float

    @property
    def host_bytes(self) -> float:
        return sum(self.host.values())


def training_state(shape: ModelShape, setup: Setup) -> TrainingState:
    """Return the state of a model that is trained as `setup` says."""
    parameters, trainable = shape.parameters, shape.trainable
    master, copied = setup.master_size(shape), copies_to_fp32(setup.engine, shape.itemsize)
    # FSDP2 keeps its masters in place of the weights and gathers those in 16 bits; DeepSpeed's are a copy, in its optimizer.
    own_size = shape.itemsize - shape.weights_saved / parameters
    kept_size = own_size if copied else own_size + (master - shape.itemsize) * trainable / parameters
    count = rank_bytes(
        setup.engine,
        parameters=parameters,
        trainable=trainable,
        unit=max(shape.layer_parameters, shape.head_parameters),  # embeddings are gathered apart from the head
        ranks=setup.gpus,
        parameter_size=kept_size,
        gradient_size=shape.itemsize if copied else master,
        optimizer_size=_state_size(setup.optimizer, master) + (4 if copied and setup.optimizer != "none" else 0),
        gathered_size=own_size,
        reduced_size=shape.itemsize,
    )
    share = count.gradients / (trainable * shape.itemsize) if setup.keeps_gradients else 0.0
    device: Parts = {"weights": count.parameters, "optimizer state": count.optimizer, "other": count.working}
    if not setup.keeps_gradients and shape.tied:
        device["gradients"] = float(shape.itemsize * shape.head_trainable)
    host: Parts = {}
    if setup.steps_on_host:
        host = {"optimizer state": count.optimizer, "gradients": count.gradients * _host_gradient_factor(setup.engine)}
        # A layer's gradients on their way, beside the next layer's work; an engine's are among its working copies.
        on_the_way = shape.layer_trainable * shape.itemsize if setup.engine == "none" else 0.0
        device |= {"optimizer state": 0.0, "other": count.working + on_the_way}
        if setup.engine == "none":
            host["weights"] = float(trainable * shape.itemsize)  # the copy that is stepped
    if setup.weights == "host":
        stays, layers = _weights_apart(shape, count.parameters) if setup.engine == "none" else (0.0, count.parameters)
        device["weights"], host["weights"] = stays, max(layers, host.get("weights", 0.0))
    if setup.second_model:
        device["weights"] += parameters * shape.itemsize
    return TrainingState(device, host, share)


def _weights_apart(shape: ModelShape, total_bytes: float) -> tuple[float, float]:
    """Return the bytes on the GPU, two layers among them, and of all layers on the host."""
    outside = float(shape.outside_parameters * shape.itemsize)
    layers = total_bytes - outside
    return outside + layers * min(2, shape.layers) / shape.layers, layers


def copies_to_fp32(engine: str, itemsize: int) -> bool:
    """Return whether an engine's optimizer works on a copy of the weights in fp32, as DeepSpeed's does for 16 bits."""
    return engine in _ZERO and itemsize == 2


def _host_gradient_factor(engine: str) -> float:
    """Return the host's bytes of gradients over the GPU's: DeepSpeed's are in fp32 and, in stage 3, in a 16-bit buffer too."""
    return {"zero1": 2.0, "zero2": 2.0, "zero3": 3.0}.get(engine, 1.0)


def _state_size(optimizer: str, moment_size: int) -> int:
    """Return the bytes of the moments per trainable parameter."""
    return {"adamw8bit": 2, "sgd": 0, "none": 0}.get(optimizer, 2 * moment_size)
