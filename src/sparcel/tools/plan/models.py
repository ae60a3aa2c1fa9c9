"""Models that people train: how many parameters they have, and what a sample costs to compute."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from sparcel.core import units
from sparcel.core._checks import check_type, checked_number, checked_whole
from sparcel.errors import checked_name


@dataclass(frozen=True)
class Model:
    """What of a model its exchange and its computation depend on.

    Attributes
    ----------
    parameters
        That are trained: coordinates of the gradient.
    flops
        Of a forward and a backward pass over one sample; 0 where unknown.
    kind
        ``"text"`` or ``"images"``: which recorded trainings are near.
    """

    name: str
    parameters: int
    flops: float = 0.0
    kind: str = "text"

    def __post_init__(self) -> None:
        checked_whole(self.parameters, "the parameters of a model to plan for", at_least=1)
        checked_number(self.flops, "flops", at_least=0)


def _vision(name: str, parameters: int, gigamacs: float) -> Model:
    """Return a model of images: a multiply-add is 2 FLOPs, a backward pass twice a forward one."""
    return Model(name, parameters, 6e9 * gigamacs, "images")


def _language(name: str, parameters: int, tokens: int) -> Model:
    """Return a model of texts: 6 FLOPs a parameter and token (Kaplan et al. 2020, section 2.1)."""
    return Model(name, parameters, 6.0 * parameters * tokens)


MODELS = {
    model.name: model
    for model in (
        # Parameters and multiply-adds at 224 x 224 as torchvision's documentation lists them.
        _vision("resnet18", 11_689_512, 1.81),
        _vision("resnet50", 25_557_032, 4.09),
        _vision("vgg16", 138_357_544, 15.47),
        _vision("vit-b16", 86_567_656, 17.56),
        # Devlin et al. 2018, section 3; sequences of 128, as 90 % of the pre-training has them.
        _language("bert-base", 110_000_000, 128),
        _language("bert-large", 340_000_000, 128),
        # The checkpoints of Radford et al. 2019, with tied embeddings.
        _language("gpt2", 124_439_808, 1024),
        _language("gpt2-xl", 1_557_611_200, 1024),
        # Touvron et al. 2023, table 2; "Llama 2", table 1: the same shapes, longer sequences.
        _language("llama-7b", 6_738_415_616, 2048),
        _language("llama-2-7b", 6_738_415_616, 4096),
        # The checkpoint's config.json: 16 layers of 2048, MLPs of 8192, keys and values of 512,
        # 128,256 tokens with tied embeddings; sequences as in Llama 3's pre-training.
        _language("llama-3.2-1b", 1_235_814_400, 8192),
    )
}
"""Models by name."""


def model_of(given: str | int | nn.Module) -> Model:
    """Return the model that a name, a number of parameters or a module stands for.

    Parameters
    ----------
    given
        One of `MODELS`; a number such as ``25_600_000``, ``"25.6M"`` or ``"7B"``, of a model of
        text; or a module, of which the parameters that are trained count, and which is of images
        where it has a convolution over two dimensions.

    Raises
    ------
    InputError
        When it is none of these, or has no parameters.
    """
    if isinstance(given, int):
        return Model(f"{given:,} parameters", given)
    if isinstance(given, str):
        if given.strip()[:1].isdigit():
            return Model(f"{given.strip()} parameters", units.whole(given))
        return MODELS[checked_name(given, MODELS, "model")]
    check_type(given, nn.Module, "model", "a name and a number of parameters are models, too")
    trained = sum(p.numel() for p in given.parameters() if p.requires_grad)
    kind = "images" if any(isinstance(one, nn.Conv2d) for one in given.modules()) else "text"
    return Model(type(given).__name__, trained, kind=kind)
