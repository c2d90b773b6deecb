"""Other attention for a config in two words: `attention=gated_delta,softmax mode=state,ring`.

`attention` names the variants of the pattern, one for each of the first layers, and gives them their default settings;
`mode` one mode for all of these, or one for each. Either word may stand alone: variants in their default mode, or the
config's own pattern in other modes. Where a mode crosses the ring axis and the mesh has none, its ranks go there.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args, get_type_hints

from experiments.base import RunConfig
from mmcp.attention import ATTENTION
from mmcp.parallel.mesh import MeshConfig
from mmcp.parallel.modes import MODES

EXAMPLES = {"attention": "linear,softmax", "mode": "state,ring"}


def take_choice(overrides: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Part the two words from the other overrides: {"mode": ["state", "ring"]}, ["seed=1"].

    Raises ValueError for a word that stands twice or without a value.
    """
    chosen: dict[str, list[str]] = {}
    rest = []
    for override in overrides:
        word, equals, value = (part.strip() for part in override.partition("="))
        if not equals or word not in EXAMPLES:
            rest.append(override)
            continue
        names = [name.strip() for name in value.split(",")]
        if word in chosen or not all(names):
            raise ValueError(f"'{override}': give {word} once, names joined by commas, as {word}={EXAMPLES[word]}")
        chosen[word] = names
    return chosen, rest


def with_choice(settings: RunConfig, chosen: dict[str, list[str]]) -> RunConfig:
    """Return the config with the chosen attention and modes, and a mesh that the modes cross.

    Raises ValueError for a name that is unknown, a mode that its variant does not have, or counts that differ.
    """
    if not chosen:
        return settings
    pattern = settings.model.backbone.pattern
    if "attention" in chosen:
        pattern = tuple(_variant(name) for name in chosen["attention"])
    modes = chosen.get("mode", [variant.mode for variant in pattern])
    if len(modes) not in (1, len(pattern)):
        layers = ", ".join(variant.name for variant in pattern)
        raise ValueError(f"mode={','.join(modes)} names {len(modes)} modes for the layers {layers}; name one or each")
    modes = modes * (len(pattern) // len(modes))
    settings = settings.with_pattern(tuple(_in_mode(*layer) for layer in zip(pattern, modes, strict=True)))
    crosses = any(not MODES[mode].is_flat for mode in modes)
    return replace(settings, mesh=_crossing(settings.mesh)) if crosses else settings


def _variant(name: str) -> Any:
    if name not in ATTENTION:
        raise ValueError(f"attention '{name}' is unknown; use one of {', '.join(sorted(ATTENTION))}")
    return ATTENTION[name]()


def _in_mode(variant: Any, mode: str) -> Any:
    possible = get_args(get_type_hints(type(variant)).get("mode")) or (variant.mode,)
    if mode not in possible:
        known = "" if mode in MODES else f"mode '{mode}' is unknown; "
        raise ValueError(f"{known}attention '{variant.name}' works in {' or '.join(possible)}, not in '{mode}'")
    return replace(variant, mode=mode) if mode != variant.mode else variant


def _crossing(mesh: MeshConfig) -> MeshConfig:
    """Put the context-parallel ranks on the ring axis where there is none."""
    return replace(mesh, ring=mesh.ulysses, ulysses=1) if mesh.ring == 1 else mesh
