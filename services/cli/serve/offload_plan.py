"""The policy of bulk workers: asked for, chosen by the programme for measured rates, or left to the workers.

Workers cannot import the planner. So the policy is decided here, before anything starts, and handed to them as text.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from diptych.config.load import LoadedConfig
from diptych.config.options import Config
from diptych.errors import ConfigError
from diptych.extras import require_extra
from diptych.specs import BulkPlan, WorkerSpec
from engine.model.checkpoint import Checkpoint, find_model
from engine.model.kv_codec import resolve_kv_codec
from engine.model.memory_plan import available_memory
from engine.offload.policy import BlockPolicy, default_policy, format_policy, names_shape, parse_policy
from kvcache.codecs.codec_id import CALIBRATED, parse_codec_id
from planner.types import BulkRates
from services.cluster.spec import DeploymentSpec
from services.host.model_probe import ProbedModel, calibration_path

# The shares of the memory and the disk there is that the blocks of all workers may take, unless the caps say otherwise.
MEMORY_SHARE, DISK_SHARE = 0.8, 0.5


def check_bulk_settings(loaded: LoadedConfig) -> None:
    """Check --bulk-policy and --bulk-profile as far as that is possible without the model. Raises ConfigError."""
    if loaded.config.bulk_profile is not None:
        require_extra("plan", "--bulk-profile", ", or leave out --bulk-profile")
    text = loaded.config.bulk_policy
    if text is not None:
        parse_policy(text, default_policy(1))
        names_shape(text)


def with_bulk_plan(spec: DeploymentSpec, config: Config, model: ProbedModel) -> DeploymentSpec:
    """The deployment with the policy and the caps of its bulk workers.

    Raises:
        ConfigError: the policy or the profile cannot be used, or not even the smallest block fits.
        ModelError: KV is to be coded with a calibration that is not there.
    """
    memory = config.bulk_memory_bytes
    if memory is None:
        memory = int(MEMORY_SHARE * available_memory() / config.bulk)
    disk = config.bulk_disk_bytes
    if disk is None:
        # Here, not in each worker: the workers share it, and one that starts again finds its own files on the disk.
        disk = _share_disk(config, model)
    plan = plan_bulk(config, model, memory, disk)

    def complete(worker: WorkerSpec) -> WorkerSpec:
        return msgspec.structs.replace(
            worker,
            bulk_policy=plan.policy or config.bulk_policy or "",
            bulk_planned=plan.source == "profile",
            bulk_memory_bytes=memory,
            bulk_disk_bytes=disk,
        )

    return replace(
        spec,
        workers=tuple(complete(worker) for worker in spec.workers),
        gateway=msgspec.structs.replace(spec.gateway, bulk_plan=plan),
    )


def _share_disk(config: Config, model: ProbedModel) -> int:
    """The disk that each worker may take: what the model's prepared weights have already counts as free.

    Raises ConfigError if there is no folder for its files.
    """
    # Imported only here, since they import numba.
    from diptych.kernels.cache import machine_kernel_folder
    from engine.cpu.weights.prepared_name import free_disk_bytes

    folder: Path | None = machine_kernel_folder()
    if folder is None:
        raise ConfigError(
            "bulk work has no place for its files",
            "its own folder cannot be used",
            "set NUMBA_CACHE_DIR to a private folder",
        )
    kind = parse_policy(config.bulk_policy or "", default_policy(model.max_model_len)).weight_kind
    free = free_disk_bytes(folder, Checkpoint.resolve(model.path, config.revision), kind)
    return int(DISK_SHARE * free / config.bulk)


def needs_weights(config: Config) -> bool:
    """Whether bulk work of these settings is planned with the model's weights: a calibration is compared with them.

    Raises:
        ConfigError: --bulk-policy cannot be read, or names no codec.
    """
    policy = parse_policy(config.bulk_policy or "", default_policy(1))
    if not policy.kv_codec:
        return False
    codec_id = parse_codec_id(policy.kv_codec)
    may_have = codec_id.takes_factors and config.kv_cache_calibration is not None
    return codec_id.family == CALIBRATED or may_have


def _find_checkpoint(config: Config, path: str) -> Checkpoint:
    """The model in a folder; unless they are needed without its weights, which lie on the nodes of a cluster alone."""
    if needs_weights(config):
        return Checkpoint.resolve(path, config.revision)
    return Checkpoint(path, *find_model(path, config.revision), weights={})


def plan_bulk(config: Config, model: ProbedModel, memory_bytes: int, disk_bytes: int | None) -> BulkPlan:
    """The policy of each bulk worker within its caps, and its prediction if there is a profile.

    Raises:
        ConfigError: the policy or the profile cannot be used, or not even the smallest block fits.
        ModelError: KV is to be coded with a calibration that is not there.
    """
    text = config.bulk_policy or ""
    policy = parse_policy(text, default_policy(model.max_model_len))
    if policy.kv_codec:
        resolve_kv_codec(_find_checkpoint(config, model.path), policy.kv_codec, calibration_path(config))
    if config.bulk_profile is not None:
        assert disk_bytes is not None
        return _plan_with_rates(config, model, policy, memory_bytes, disk_bytes)
    return BulkPlan("setting", format_policy(policy)) if names_shape(text) else BulkPlan("fit")


def _plan_with_rates(
    config: Config, model: ProbedModel, asked: BlockPolicy, memory_bytes: int, disk_bytes: int
) -> BulkPlan:
    """The programme's policy, or that of --bulk-policy, with what the profile predicts.

    The programme's memory is a little more than the engine's. So where it finds no block, the workers look for one, as
    without a profile, and only they say that nothing fits.

    Raises:
        ConfigError: the profile cannot be used, or does not say what the policy's kinds cost.
    """
    # Imported only here: the search needs scipy.
    from planner.costs.model import dims_on_cpu
    from planner.costs.model import find_model as find_dims
    from services.cli.plan.offload_search import RatedBlocks

    rates, dims = _read_rates(config, model.path), dims_on_cpu(find_dims(model.path))
    blocks = RatedBlocks(dims, rates, model.max_model_len, memory_bytes, disk_bytes, config.bulk)
    predicted = blocks.predict(asked)
    source, policy = "setting", asked
    if not names_shape(config.bulk_policy or ""):
        try:
            policy, predicted = blocks.search(asked)
        except ConfigError:
            return BulkPlan("fit", profile=str(config.bulk_profile))
        source = "profile"
    return BulkPlan(
        source,
        format_policy(policy),
        str(config.bulk_profile),
        predicted.tokens_per_s,
        predicted.binding,
        int(predicted.memory["memory"]),
        int(predicted.memory["disk"]),
    )


def _read_rates(config: Config, path: str) -> BulkRates:
    """The rates of the profile. Raises ConfigError: it is of another model, or of other workers, or has none."""
    from planner.costs.profile_file import load_profile_of

    file = config.bulk_profile
    assert file is not None
    rates = load_profile_of(file, path, "--bulk-profile").bulk
    if rates is None:
        raise ConfigError(
            f"the profile {file} does not say what bulk work costs",
            "that was not measured",
            f"add it: diptych profile {config.model} --bulk --out {file}",
        )
    if rates.threads != config.threads:
        raise ConfigError(
            f"the profile {file} is not of workers like these",
            f"it was measured with {rates.threads} thread(s), and a worker has {config.threads}",
            f"measure again with --bulk-threads {config.threads}, or use --threads {rates.threads}",
        )
    return rates
