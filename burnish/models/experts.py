"""A mixture of experts in place of a layer's MLP: the router, and gated MLPs of which each token runs a few.

    scores = softmax(router(x)) or sigmoid(router(x))          in float32 at least
    y = sum over the chosen experts e of weight_e down_e(activation(gate_e x) * up_e x)

The matrices of all experts are one parameter: expert e has rows [e * outputs, (e + 1) * outputs) of `gate_up` and of `down`.
A Hugging Face tensor of one expert is thus a block of rows, as for every other parameter, and a rank of an expert-parallel
group has a range of rows.

The rows of all (token, slot) pairs are sorted by expert, so that a product with all experts is one grouped product
(`kernels/grouped_products.py`). A row is multiplied by its weight before `down`, as in Megatron: the outputs of the experts
need not be saved for the gradient of the weights. A token's outputs are added in the order of its slots, so that its sum
does not depend on the batch. For the same reason the gradient of the input is a sum in the order of the slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from burnish.core.sharded_tensors import local_with_gradient
from burnish.models.expert_shape import ExpertShape
from burnish.models.kernels.device import use_triton
from burnish.models.kernels.elementwise import swiglu
from burnish.models.kernels.grouped_products import (
    grouped_input_gradient,
    grouped_product,
    grouped_weight_gradient,
    sum_slots,
)

Activate = Callable[[Tensor], Tensor]
"""A gated activation: [M, 2 * size] -> [M, size]."""
MAX_DECODE_ROWS = 160
"""Mean number of rows of an expert up to which the decode kernels are faster than `torch._grouped_mm` (`bench/expert_kernels.py`)."""


class Choice(NamedTuple):
    """The experts of each token."""

    experts: Tensor
    """[N, k] numbers of experts, int64."""
    weights: Tensor
    """[N, k] weights of the experts, float32 at least."""


ExchangeRows = Callable[[Tensor, Choice, Callable[[Tensor, Choice], Tensor]], Tensor]
"""(tokens, their experts, function that computes this process's experts) -> outputs of the tokens."""


class Dispatch(NamedTuple):
    """The (token, slot) pairs sorted by expert. Pairs of the same expert are in the order of the tokens."""

    tokens: Tensor
    """[M] token of each sorted row; M = N * k."""
    slots: Tensor
    """[M] index of each sorted row's pair in [N * k]."""
    rows: Tensor
    """[N, k] sorted row of each pair."""
    ends: Tensor
    """[E] end of each expert's rows, int32."""


def route(
    logits: Tensor, shape: ExpertShape, score_bias: Tensor | None = None, replayed: Tensor | None = None
) -> tuple[Choice, Tensor]:
    """The experts of each token with their weights, and the scores [N, E], from the router's logits [N, E].

    `replayed` [N, k] gives the experts instead; entries below 0 leave the choice to the router, which chooses none that the row has
    already. The weights are differentiable in both cases.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = wide.softmax(-1) if shape.scoring == "softmax" else _Sigmoid.apply(wide)
    chosen = choose_experts(scores.detach(), shape, score_bias, replayed)
    if replayed is not None:
        is_open = replayed < 0
        # The k-th open slot of a row has the k-th best expert that is not in it.
        best = chosen.gather(1, (is_open.cumsum(1) - 1).clamp(min=0))
        chosen = torch.where(is_open, best, replayed.to(chosen.dtype))
    weights = scores.gather(1, chosen)
    if shape.normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return Choice(chosen, weights if shape.weight_scale == 1.0 else weights * shape.weight_scale), scores


def choose_experts(
    scores: Tensor, shape: ExpertShape, score_bias: Tensor | None = None, taken: Tensor | None = None
) -> Tensor:
    """The numbers [N, k] of the experts with the best scores [N, E], within the best groups if there are several.

    Experts that a row of `taken` [N, k] has are ranked last; entries below 0 are none.
    """
    ranked = scores if score_bias is None else scores + score_bias
    if shape.num_groups > 1:
        grouped = ranked.view(ranked.shape[0], shape.num_groups, -1)
        best = grouped.topk(2, -1).values.sum(-1).topk(shape.chosen_groups, -1).indices
        is_out = torch.ones(grouped.shape[:2], dtype=torch.bool, device=best.device).scatter_(1, best, False)
        ranked = grouped.masked_fill(is_out[:, :, None], -torch.inf).flatten(1)
    if taken is not None:
        is_taken = torch.zeros(ranked.shape[0], ranked.shape[1] + 1, dtype=torch.bool, device=ranked.device)
        is_taken.scatter_(1, torch.where(taken < 0, ranked.shape[1], taken.long()), True)
        ranked = ranked.masked_fill(is_taken[:, :-1], -torch.inf)
    return ranked.topk(shape.experts_per_token, -1).indices


def dispatch(experts: Tensor, num_experts: int) -> Dispatch:
    """Sort the (token, slot) pairs of `experts` [N, k] by expert, without a device sync."""
    num_pairs, per_token = experts.numel(), experts.shape[1]
    ordered, slots = experts.reshape(-1).sort(stable=True)
    rows = torch.empty_like(slots)
    rows[slots] = torch.arange(num_pairs, device=slots.device)
    numbers = torch.arange(num_experts, device=slots.device)
    ends = torch.searchsorted(ordered, numbers, right=True, out_int32=True)
    return Dispatch(slots // per_token, slots, rows.view(-1, per_token), ends)


class ExpertLinear(nn.Linear):
    """One matrix [outputs, inputs] for each expert, stacked to a weight [experts * outputs, inputs]."""

    def __init__(self, num_experts: int, num_inputs: int, num_outputs: int) -> None:
        super().__init__(num_inputs, num_experts * num_outputs, bias=False)
        self.num_experts = num_experts
        """Experts of this process: all, or a part of them with expert parallelism."""

    def matrices(self) -> Tensor:
        """The matrices [experts, outputs, inputs]."""
        return local_with_gradient(self.weight).view(self.num_experts, -1, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("the rows of an expert layer have an expert each: call `from_tokens` or `to_tokens`")

    def from_tokens(self, x: Tensor, way: Dispatch) -> Tensor:
        """The product of each sorted row: tokens [N, inputs] -> [M, outputs]."""
        return _FromTokens.apply(x, self.matrices(), way)

    def to_tokens(self, rows: Tensor, way: Dispatch) -> Tensor:
        """The sum of each token's products: sorted rows [M, inputs] -> [N, outputs]."""
        return _ToTokens.apply(rows, self.matrices(), way)


class RouterPass(Protocol):
    """A forward pass that does more than choose experts (`router_pass.py`)."""

    def choose(self, mlp: ExpertMlp, logits: Tensor, score_bias: Tensor | None) -> Choice:
        """The experts of each token from the logits [N, E] of a layer's router."""


class ExpertMlp(nn.Module):
    """The router and the experts of one layer; `place` is its index among the layers with experts."""

    def __init__(self, hidden_size: int, shape: ExpertShape, activate: Activate, place: int = 0) -> None:
        super().__init__()
        self.shape, self.activate, self.place = shape, activate, place
        self.router_pass: RouterPass | None = None
        """If set, it makes the choice."""
        self.router = nn.Linear(hidden_size, shape.num_experts, bias=False)
        self.gate_up = ExpertLinear(shape.num_experts, hidden_size, 2 * shape.expert_size)
        self.down = ExpertLinear(shape.num_experts, shape.expert_size, hidden_size)
        self.exchange: ExchangeRows | None = None
        """If set, rows are computed by the process that has their expert (expert parallelism)."""
        if shape.has_score_bias:
            self.score_bias = nn.Parameter(torch.zeros(shape.num_experts), requires_grad=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExpertMlp:
        """Keep the bias of the choice in float32 at least, as transformers does: rounded to a half type it changes the choice."""
        before = self.score_bias.detach() if self.shape.has_score_bias else None
        super()._apply(fn, recurse)
        if before is not None and self.score_bias.dtype.itemsize < 4:
            wide = before.to(device=self.score_bias.device, dtype=torch.float32)
            self.score_bias = nn.Parameter(wide, requires_grad=False)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """The experts' output of tokens [N, hidden]."""
        return self.compute(x, self.choose(self.router(x)))

    def infer(self, x: Tensor) -> Tensor:
        """The same for an engine, without gradient: with the decode kernels where they can and pay."""
        shape = self.shape
        matrices = self.gate_up, self.down
        if (
            not use_triton(x)
            or x.dtype not in (torch.bfloat16, torch.float16)
            or self.activate is not swiglu
            or self.exchange is not None
            or any(type(one) is not ExpertLinear for one in matrices)
            or x.shape[0] * shape.experts_per_token > MAX_DECODE_ROWS * shape.num_experts
        ):
            return self(x)
        from burnish.models.kernels.triton import expert_decode, expert_kernels

        logits = self.router(x)
        if (
            self.router_pass is None
            and shape.scoring == "softmax"
            and shape.num_groups == 1
            and not shape.has_score_bias
        ):
            choice = Choice(*expert_decode.route(logits, shape.experts_per_token, shape.normalised, shape.weight_scale))
        else:
            choice = self.choose(logits)
        way = Dispatch(*expert_decode.sort_pairs(choice.experts, shape.num_experts))
        gate_up, down = (one.matrices() for one in matrices)
        rows = expert_decode.gate_up(x, gate_up, choice.weights, way.tokens, way.slots, way.ends)
        return expert_kernels.sum_slots(expert_decode.down(rows, down, way.ends), way.rows)

    def choose(self, logits: Tensor) -> Choice:
        """The experts of each token from the router's logits [N, E]."""
        bias = self.score_bias if self.shape.has_score_bias else None
        if self.router_pass is not None:
            return self.router_pass.choose(self, logits, bias)
        return route(logits, self.shape, bias)[0]

    def in_this_pass(self, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A function that runs with the present router pass, also when it is recomputed during another one."""
        own = self.router_pass

        def bound(*inputs: Any) -> Tensor:
            present, self.router_pass = self.router_pass, own
            try:
                return run(*inputs)
            finally:
                self.router_pass = present

        return bound

    def compute(self, x: Tensor, choice: Choice) -> Tensor:
        """The weighted sum of the chosen experts' outputs."""
        return self.compute_own(x, choice) if self.exchange is None else self.exchange(x, choice, self.compute_own)

    def compute_own(self, x: Tensor, choice: Choice) -> Tensor:
        """The same, for numbers of experts that count this process's experts only."""
        way = dispatch(choice.experts, self.gate_up.num_experts)
        return self.down.to_tokens(self.activated(self.gate_up.from_tokens(x, way), choice.weights, way.slots), way)

    def activated(self, gate_up: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
        """The input of `down`: the gated activation of sorted rows [M, 2 * size], times their weights of [N, k]."""
        return weighted_rows(self.activate, gate_up, weights.reshape(-1).index_select(0, slots))


def weighted_rows(activate: Activate, gate_up: Tensor, weights: Tensor) -> Tensor:
    """activate(gate_up) times the weight of each row; only `gate_up` and the weights are saved for the backward pass."""
    if torch.is_grad_enabled() and (gate_up.requires_grad or weights.requires_grad):
        return _WeightedRows.apply(gate_up, weights, activate)
    return activate(gate_up) * weights[:, None].to(gate_up.dtype)


class _Sigmoid(torch.autograd.Function):
    """The logistic function. torch's own rounds the end of each thread's range differently from the rest; its exponential does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scores = 1 / (1 + (-x).exp())
        ctx.save_for_backward(scores)
        return scores

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (scores,) = ctx.saved_tensors
        return grads[0] * scores * (1 - scores)


class _FromTokens(torch.autograd.Function):
    """Gather and product. The sorted rows, k times as many as tokens, are gathered again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrices: Tensor, way: Dispatch) -> Tensor:
        # The indices are saved too, so that activation checkpointing recomputes them.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, matrices, *way)
        return grouped_product(x[way.tokens], matrices, way.ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, matrices, *indices = ctx.saved_tensors
        way, grad = Dispatch(*indices), grads[0].contiguous()
        grad_x = grad_matrices = None
        if ctx.needs_input_grad[1]:
            grad_matrices = grouped_weight_gradient(grad, x[way.tokens], way.ends)
        if ctx.needs_input_grad[0]:
            grad_x = sum_slots(grouped_input_gradient(grad, matrices, way.ends), way.rows)
        return grad_x, grad_matrices, None


class _ToTokens(torch.autograd.Function):
    """Product and sum over the slots of each token."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor, way: Dispatch) -> Tensor:
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, matrices, *way)
        return sum_slots(grouped_product(rows, matrices, way.ends), way.rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows, matrices, *indices = ctx.saved_tensors
        way = Dispatch(*indices)
        grad = grads[0][way.tokens]
        grad_rows = grad_matrices = None
        if ctx.needs_input_grad[1]:
            grad_matrices = grouped_weight_gradient(grad, rows, way.ends)
        if ctx.needs_input_grad[0]:
            grad_rows = grouped_input_gradient(grad, matrices, way.ends)
        return grad_rows, grad_matrices, None


class _WeightedRows(torch.autograd.Function):
    """activate(gate_up) * weights, with the activation computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor, activate: Activate) -> Tensor:
        ctx.activate = activate
        ctx.save_for_backward(gate_up, weights)
        return activate(gate_up) * weights[:, None].to(gate_up.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gate_up, weights = ctx.saved_tensors
        (grad,) = grads
        with torch.enable_grad():
            leaf = gate_up.detach().requires_grad_()
            activated = ctx.activate(leaf)
        (grad_gate_up,) = torch.autograd.grad(activated, leaf, grad * weights[:, None].to(grad.dtype))
        grad_weights = (activated.detach() * grad).sum(-1, dtype=weights.dtype)
        return grad_gate_up, grad_weights, None
