"""Parameter groups, Muon beside AdamW, and a schedule that follows the clock."""

import re
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel
from transformers.training_args import OptimizerNames

from ..errors import UserError
from ..speed.hardware import bf16_is_fast
from .arguments import ViTTrainingArguments

SCHEDULE_STEPS = 10_000  # steps of a schedule that is read by the share of training done


def decayed_parameters(model: nn.Module) -> list[str]:
    """Return the parameters that weight decay applies to: the weights of linear layers and convolutions.

    So biases, norms, the tokens and the positions stay undecayed (Beyer et al. 2022, https://arxiv.org/abs/2205.01580,
    and its code); the stock Trainer decays tokens and positions.
    """
    return [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]


def layer_number(name: str, num_hidden_layers: int) -> int:
    """Return the depth of a parameter: 0 for the embeddings, the layers from 1, and one more for the rest."""
    if match := re.search(r"(?:^|\.)layers\.(\d+)\.", name):
        return int(match[1]) + 1
    return 0 if re.search(r"(?:^|\.)embeddings\.", name) else num_hidden_layers + 1


def freeze(model: PreTrainedModel, layers: str | None) -> None:
    """Exclude the embeddings and the first `layers` layers from training, or for "all" the whole encoder."""
    if layers is None:
        return
    number_of_layers = model.config.num_hidden_layers
    if layers != "all" and int(layers) > number_of_layers:
        raise UserError(f"freeze_layers must be all or at most the model's {number_of_layers} layers, got {layers}.")
    last = number_of_layers + 1 if layers == "all" else int(layers)
    for name, parameter in model.base_model.named_parameters():
        if layer_number(name, number_of_layers) <= last:
            parameter.requires_grad_(False)


def parameter_groups(model: PreTrainedModel, args: ViTTrainingArguments, learning_rate: float) -> list[dict[str, Any]]:
    """Group the trainable parameters by optimizer, weight decay and learning rate, the highest rate first.

    Layer l of L has the rate `learning_rate * layer_decay ** (L + 1 - l)` (Clark et al. 2020, ELECTRA,
    https://arxiv.org/abs/2003.10555, appendix A; Bao et al. 2021, BEiT, https://arxiv.org/abs/2106.08254). Weight
    decay applies to `decayed_parameters`. With `muon`, the matrices within the layers form groups with `"muon": True`,
    whose rate is `muon_learning_rate` if there is one.
    """
    num_hidden_layers = model.config.num_hidden_layers if args.muon or args.layer_decay != 1 else 0
    numbers = {name: layer_number(name, num_hidden_layers) for name, _ in model.named_parameters()}
    if num_hidden_layers and not any(0 < number <= num_hidden_layers for number in numbers.values()):
        raise UserError(
            f"layer_decay and muon need parameters named layers.0 and so on; {type(model).__name__} has none."
        )
    decayed = set(decayed_parameters(model))
    groups: dict[tuple[bool, bool, float], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        number, is_decayed = numbers[name], name in decayed
        by_muon = args.muon and parameter.ndim == 2 and is_decayed and 0 < number <= num_hidden_layers
        rate = args.muon_learning_rate if by_muon and args.muon_learning_rate is not None else learning_rate
        rate *= args.layer_decay ** (num_hidden_layers + 1 - number)
        options = {"lr": rate, "weight_decay": args.weight_decay if is_decayed else 0.0, "muon": by_muon}
        groups.setdefault((by_muon, is_decayed, rate), {"params": [], **options})["params"].append(parameter)
    return sorted(groups.values(), key=lambda group: (group["muon"], -group["lr"]))


def build_optimizer(
    model: PreTrainedModel,
    args: ViTTrainingArguments,
    optimizer_class: type[torch.optim.Optimizer],
    options: dict[str, Any],
) -> torch.optim.Optimizer:
    """Build the optimizer that the arguments ask for, with Muon for the matrices of the layers if they ask for it.

    The stock Trainer chooses `optimizer_class` and its options by `args.optim`.
    """
    groups = parameter_groups(model, args, options.get("lr", args.learning_rate))
    if not any(group["muon"] for group in groups):  # none is asked for, or the layers are frozen
        return optimizer_class(groups, **options)
    if optimizer_class is not torch.optim.AdamW:
        raise UserError(f"muon needs AdamW beside it, got optim {OptimizerNames(args.optim).value}.")
    dtype = torch.bfloat16 if bf16_is_fast(args.device.type) else torch.float32
    return MuonWithAdamW(groups, muon_dtype=dtype, muon_beta2=args.muon_beta2, **options)


def orthogonalize(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Bring the singular values of each matrix near 1, by Newton and Schulz's iteration.

    Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/: X <- a X + (b X X^T + c (X X^T)^2) X.

    (n, rows, cols), kept, in the precision of the iteration. The coefficients are a, b and c; `eps` is the least norm
    by which a matrix is divided at first.
    """
    a, b, c = coefficients
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices  # the smaller products
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class BatchedMuon(torch.optim.Muon):
    """`torch.optim.Muon`, for all matrices of one shape at once, and NorMuon.

    Without `beta2`, the mathematics and the state are the same. The many small matrices of a small model are slow one
    after another, and on a GPU each would start kernels of its own. Matrices that are spread over devices (FSDP) go
    one by one, as in torch, in bfloat16.

    Args:
        params: As in `torch.optim.Muon`, like `options`.
        dtype: Precision of the products; torch's is bfloat16 everywhere.
        beta2: Decay of the mean squared update of each neuron, by whose root NorMuon divides the orthogonal update (Li
            et al. 2025, https://arxiv.org/abs/2510.05491, algorithm 1). The norm of the matrix stays. A neuron is a
            row of a square or tall matrix and, as in modded-nanogpt but not in the paper, a column of a wide one.
    """

    def __init__(self, params: Any, dtype: torch.dtype = torch.bfloat16, beta2: float | None = None, **options: Any):
        super().__init__(params, **options)
        self._dtype, self._beta2 = dtype, beta2

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if closure is not None or any(isinstance(parameter, DTensor) for parameter in parameters):
            if self._beta2 is not None:
                raise UserError("muon_beta2 needs whole matrices, but FSDP spreads them. Give --muon_beta2 null.")
            return super().step(closure)
        for group in self.param_groups:
            by_shape: dict[Any, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault((parameter.shape, parameter.device, parameter.dtype), []).append(parameter)
            for same in by_shape.values():
                self._step_together(same, group)
        return None

    def _step_together(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        gradients = [cast(Tensor, parameter.grad) for parameter in parameters]
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        updates = torch.stack(torch._foreach_lerp(gradients, buffers, group["momentum"]))  # Nesterov's
        updates = orthogonalize(updates.to(self._dtype), group["ns_coefficients"], group["ns_steps"], group["eps"])
        if self._beta2 is not None:
            updates = self._normalize_neurons(parameters, updates.float(), self._beta2)
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        rate = group["lr"] * 0.2 * max(updates.shape[1:]) ** 0.5
        torch._foreach_add_(parameters, updates.to(parameters[0].dtype).unbind(), alpha=-rate)

    def _normalize_neurons(self, parameters: list[Tensor], updates: Tensor, beta2: float) -> Tensor:
        """Divide updates (n, rows, cols) of each neuron by the root of their mean square over the steps."""
        squares = updates.square().mean(dim=2 if updates.shape[1] >= updates.shape[2] else 1, keepdim=True)
        for parameter, square in zip(parameters, squares, strict=True):
            if "second_moment" not in self.state[parameter]:
                # `load_state_dict` brings all states to the precision of their parameters.
                self.state[parameter]["second_moment"] = torch.zeros_like(square, dtype=parameter.dtype)
        second_moments = [self.state[parameter]["second_moment"] for parameter in parameters]
        torch._foreach_lerp_(second_moments, squares.to(parameters[0].dtype).unbind(), 1 - beta2)
        scales = torch.stack(second_moments).float().clamp(min=1e-10).rsqrt()
        sums = (x.sum(dim=(1, 2), keepdim=True) for x in (squares, squares * scales.square()))
        return updates * (scales * torch.div(*sums).sqrt().nan_to_num(0))  # an update of zeros stays


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for some groups and `torch.optim.AdamW` for the others, as one optimizer.

    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) makes the update of a matrix nearly
    orthogonal. Its step is scaled to the size of AdamW's (Liu et al. 2025, https://arxiv.org/abs/2502.16982,
    equation 4), so that one learning rate and one weight decay serve both. The groups are those of
    `parameter_groups`, the other options those of AdamW.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        muon_dtype: torch.dtype = torch.bfloat16,
        muon_beta2: float | None = None,
        **adamw: Any,
    ):
        of_muon, of_adamw = ([group for group in groups if group["muon"] is which] for which in (True, False))
        self._muon = BatchedMuon(of_muon, muon_dtype, muon_beta2, adjust_lr_fn="match_rms_adamw")
        self._adamw = torch.optim.AdamW(of_adamw or [{"params": [], "muon": False}], **adamw)
        # Some schedules of transformers read the rate from the defaults.
        super().__init__(self._adamw.param_groups + self._muon.param_groups, {"lr": self._adamw.defaults["lr"]})

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step both, on this optimizer's own groups and state, which schedulers and checkpoints know."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for part in (self._muon, self._adamw):
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if group["muon"] == (part is self._muon)]
            part.step()
        return loss


def follow_progress(schedule: Any, progress: Callable[[], float]) -> LambdaLR:
    """Make a schedule of transformers follow the share of training done instead of the number of steps.

    It is made for `SCHEDULE_STEPS`, so its numbers of steps count out of 10,000. `progress` is called at each step.
    It returns the share of training that is done, 0 to 1, of which the first part warms up.
    """
    if not isinstance(schedule, LambdaLR):
        raise UserError(f"{type(schedule).__name__} follows a metric, not max_train_minutes. Leave one of them out.")
    factor: Any = schedule.lr_lambdas[0]
    schedule.lr_lambdas = [lambda _: factor(round(progress() * SCHEDULE_STEPS))] * len(schedule.lr_lambdas)
    return schedule
