"""Why a choice is what it is, what it assumes, and what would make a thing fit: sentences made of the figures."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mmcp.planning.choose import Choice, Job, Prediction, Setting, choose
from mmcp.planning.memory import TILE, MemoryPolicy

MOST_DEVICES = 1 << 16


@dataclass(frozen=True)
class Assumption:
    """What a figure rests on."""

    text: str
    is_offered: bool = True
    """Whether `mmcp train` does so; what it does not do yet must be built before the figure can be reached."""


def assumptions(job: Job, setting: Setting) -> list[Assumption]:
    """List what the prediction of a setting takes for granted."""
    device, architecture = job.device, job.architecture
    listed = [
        Assumption(
            f"a {device.name} reaches {device.flops_share:.0%} of {device.flops / 1e12:,.0f} TFLOP/s, links reach "
            f"{device.rate_share:.0%} of {device.node_rate / 1e9:,.0f} GB/s in a node of {device.node_size} and of "
            f"{device.network_rate / 1e9:,.0f} GB/s between nodes"
        ),
        Assumption("tokens, units and label rows are shared out evenly, as the balanced strategy makes them"),
        Assumption(f"computation in {str(job.dtype).removeprefix('torch.')}, parameters sharded by FSDP2"),
        *(Assumption(note) for note in architecture.notes),
        *(Assumption(text, is_offered=False) for text in missing(job, setting)),
    ]
    return listed


def missing(job: Job, setting: Setting) -> Iterator[str]:
    """Say what of a setting `mmcp train` does not offer yet."""
    policy, architecture = setting.policy, job.architecture
    if policy.offload_optimizer:
        yield "parameters, gradients and moments on the host"
    if policy.offload_activations:
        yield f"inputs of checkpointed blocks on the host; norms computed {TILE:,} tokens at a time"
    if architecture.experts:
        yield f"{architecture.experts} experts, {architecture.active_experts} for each token"
    if architecture.tied:
        yield "one matrix for embedding and head"


def reasons(choice: Choice, *, most: int = 5) -> list[str]:
    """Compare the best setting with the best of other meshes, and name what was refused."""
    best = choice.best
    said = [compared(best, other) for other in choice.runners_up[:most]]
    said += [f"refused: {text}" for text in dict.fromkeys(choice.refused.values())]
    return said


def compared(best: Prediction, other: Prediction) -> str:
    """Say why another setting is not the best."""
    name = describe(other.setting)
    if other.misses and not best.misses:
        return f"{name} does not fit: {' and '.join(other.misses)}"
    if other.misses and best.misses:
        return f"{name} does not fit either: {' and '.join(other.misses)}"
    slower = other.step_seconds / best.step_seconds - 1
    here, there = best.seconds.as_record(), other.seconds.as_record()
    stage = max(there, key=lambda part: there[part] * other.micro_batches - here[part] * best.micro_batches)
    more = there[stage] * other.micro_batches - here[stage] * best.micro_batches
    moved = other.traffic_bytes / best.traffic_bytes - 1 if best.traffic_bytes else 0.0
    return f"{name} takes {slower:.1%} longer ({stage} {more:+.3g} s), moves {moved:+.0%} bytes"


def describe(setting: Setting) -> str:
    """Name a setting in a line."""
    mesh, policy = setting.mesh, setting.policy
    data = f"dp={mesh.dp_replicate}x{mesh.dp_shard} " if mesh.data > 1 else ""
    kept = " with checkpointing" if policy.checkpointing else ""
    return f"{data}ring={mesh.ring} x ulysses={mesh.ulysses} ({setting.modes}){kept}"


def remedies(job: Job, policies: tuple[MemoryPolicy, ...]) -> list[str]:
    """Say what would make a job fit that does not: a leaner policy, more devices, fewer tokens."""
    prefetch = policies[0].prefetch
    leaner = {
        "checkpointing": MemoryPolicy(checkpointing=True, prefetch=prefetch),
        "--offload activations": MemoryPolicy(checkpointing=True, offload_activations=True, prefetch=prefetch),
        "--offload optimizer": MemoryPolicy(checkpointing=True, offload_optimizer=True, prefetch=prefetch),
        "--offload optimizer,activations": MemoryPolicy(
            checkpointing=True, offload_optimizer=True, offload_activations=True, prefetch=prefetch
        ),
    }
    found = [name for name, policy in leaner.items() if policy not in policies and _fits(job, (policy,))]
    devices = job.devices
    while devices < MOST_DEVICES:
        devices *= 2
        if _fits(replace(job, devices=devices, memo={}), policies):
            found.append(f"--gpus {devices}")
            break
    longest = longest_row(job, policies)
    return [*found, f"rows of at most {longest:,} tokens"] if longest else found


def longest_row(job: Job, policies: tuple[MemoryPolicy, ...]) -> int:
    """Return the longest row that fits, within 1 percent, everything in proportion; 0 where none does."""
    fits, fails = 0, job.load.tokens
    while fails - fits > max(1, fails // 100):
        tokens = (fits + fails) // 2
        if _fits(shorter(job, tokens), policies):
            fits = tokens
        else:
            fails = tokens
    return fits


def shorter(job: Job, tokens: int) -> Job:
    """Return the job with rows of another length, as one document, everything else in proportion."""
    load, mask = job.load, type(job.mask).causal([tokens])

    def part(total: int) -> int:
        return total * tokens // max(1, load.tokens)

    scaled = replace(
        load,
        tokens=tokens,
        labels=part(load.labels),
        media_rows=part(load.media_rows),
        encoder_flops=part(load.encoder_flops),
        encoder_bytes=part(load.encoder_bytes),
        media_bytes=part(load.media_bytes),
        decode_ns=part(load.decode_ns),
    )
    return replace(job, load=scaled, mask=mask, memo={})


def _fits(job: Job, policies: tuple[MemoryPolicy, ...]) -> bool:
    try:
        return choose(job, policies).best.fits
    except ValueError:
        return False
