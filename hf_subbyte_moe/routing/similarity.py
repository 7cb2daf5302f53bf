"""How alike experts are: by what they are (weights) and by what they do (outputs on the same tokens).

Source: similarity of outputs, HC-SMoE (ICML 2025); similarity of weights, the first seed document.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_subbyte_moe.routing.families import experts_of_router, find_routers


def weight_similarity(model: PreTrainedModel) -> Tensor:
    """``[L, E, E]`` cosine of all weights of two experts."""
    found = []
    for place in find_routers(model):
        experts = experts_of_router(model, place)
        gram = torch.zeros(place.experts, place.experts, dtype=torch.float64)
        for weight in experts.parameters():
            if weight.ndim >= 2 and weight.shape[0] == place.experts:
                flat = weight.detach().flatten(1).float()
                gram += (flat @ flat.T).double().cpu()
        norms = gram.diagonal().clamp(min=1e-30).sqrt()
        found.append(gram / norms[:, None] / norms[None, :])
    return torch.stack(found)


def output_similarity(model: PreTrainedModel, states: list[Tensor]) -> Tensor:
    """``[L, E, E]`` mean cosine of what two experts make of the same tokens.

    Args:
        model: a MoE model.
        states: for every router ``[S, H]`` hidden states that it saw.
    """
    found = []
    for place, hidden in zip(find_routers(model), states, strict=True):
        experts = experts_of_router(model, place)
        alone = torch.ones(len(hidden), 1, dtype=hidden.dtype, device=hidden.device)
        outputs = []
        for expert in range(place.experts):
            index = torch.full((len(hidden), 1), expert, device=hidden.device)
            with torch.no_grad():
                outputs.append(nn.functional.normalize(experts(hidden, index, alone).float(), dim=-1))
        stacked = torch.stack(outputs)  # [E, S, H]
        found.append(torch.einsum("esh,fsh->ef", stacked, stacked).double().cpu() / len(hidden))
    return torch.stack(found)
