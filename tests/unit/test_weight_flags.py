"""Flags of how weights get to servers: what is refused, and what servers of the run are started with."""

from __future__ import annotations

import pytest
import torch

from relax_trio.config.backend_tree import BackendConfig
from relax_trio.config.check_weights import weight_problems
from relax_trio.config.parse import parse_config
from relax_trio.errors import ConfigError
from relax_trio.loop.servers import extra_flags, require_apart
from relax_trio.train.offload import park, parked, unpark

SGLANG = ("--rollout-backend", "sglang")
ADAPTER = (*SGLANG, "--lora-rank", "8", "--sglang-lora-transfer", "adapter")
COLOCATE = (*SGLANG, "--colocate")


def parsed(*words):
    return parse_config(list(words)).config


@pytest.mark.parametrize("words", [(), SGLANG, ADAPTER, COLOCATE, (*SGLANG, "--sglang-weight-transfer", "distributed")])
def test_what_belongs_together_is_taken(words):
    assert weight_problems(parsed(*words), trains=True) == []


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--sglang-lora-transfer", "adapter", "--lora-rank", "8"), "without --rollout-backend sglang"),
        ((*SGLANG, "--sglang-lora-transfer", "adapter"), "without --lora-rank"),
        ((*ADAPTER, "--sglang-update-recipe", "retract"), "use abort or drain"),
        ((*ADAPTER, "--sglang-update-recipe", "in_place"), "use abort or drain"),
        ((*ADAPTER, "--partial-rollout", "--partial-rollout-pause", "retract"), "use abort"),
        ((*ADAPTER, "--sglang-weight-transfer", "distributed"), "use disk or tensor"),
        ((*ADAPTER, "--colocate"), "whole weights again"),
        (("--colocate",), "needs --rollout-backend sglang"),
        ((*COLOCATE, "--sglang-server", "http://a:1"), "servers that the run starts"),
        ((*COLOCATE, "--sglang-router-ip", "a"), "servers that the run starts"),
        ((*COLOCATE, "--fully-async"), "exclude each other"),
        ((*COLOCATE, "--sglang-update-recipe", "in_place"), "use retract or abort"),
        ((*COLOCATE, "--partial-rollout", "--partial-rollout-pause", "in_place"), "use retract or abort"),
        ((*COLOCATE, "--sglang-weight-transfer", "distributed"), "on the same GPU"),
    ],
)
def test_what_can_not_work_together_is_one_problem_that_says_what_to_do(words, problem):
    (found,) = weight_problems(parsed(*words), trains=True)
    assert problem in found


def test_memory_is_lent_to_training_only():
    (found,) = weight_problems(parsed(*COLOCATE), trains=False)
    assert "for training" in found


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (SGLANG, ""),
        (COLOCATE, "--enable-memory-saver"),
        ((*COLOCATE, "--sglang-enable-memory-saver"), ""),
        (
            ADAPTER,
            "--enable-lora --max-lora-rank 8 --max-loras-per-batch 2 --lora-target-modules all",
        ),
        (
            (*ADAPTER, "--lora-target-modules", "q_proj", "v_proj", "--sglang-max-lora-rank", "64"),
            "--enable-lora --max-loras-per-batch 2 --lora-target-modules q_proj v_proj",
        ),
        (
            (*ADAPTER, "--sglang-device", "cpu"),
            "--enable-lora --max-lora-rank 8 --max-loras-per-batch 2 --lora-target-modules all "
            "--lora-backend torch_native",
        ),
    ],
)
def test_servers_of_the_run_are_started_with_what_is_asked_of_them(words, flags):
    assert " ".join(extra_flags(parsed(*words))) == flags


@pytest.mark.parametrize(("gpus", "apart"), [((), False), (("0,1", "2,3"), False), (("1",), True), (("10,11",), True)])
def test_nothing_is_broadcast_to_a_server_on_the_same_gpu(gpus, apart):
    config = BackendConfig(sglang_weight_transfer="distributed")
    require_apart(BackendConfig(), gpus, 4)
    require_apart(config, gpus, 0)
    require_apart(BackendConfig(sglang_weight_transfer="distributed", sglang_args=("--device", "cpu")), gpus, 4)
    if apart:
        require_apart(config, gpus, 4)
    else:
        with pytest.raises(ConfigError, match="--sglang-gpus"):
            require_apart(config, gpus, 4)


def test_moments_leave_the_gpu_and_come_back_to_where_their_parameters_are():
    """The meta device stands in for the place where they are not in the way."""
    weight = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    elsewhere = torch.device("meta")

    park(optimizer, elsewhere)
    state = optimizer.state[weight]
    assert {state[name].device for name in ("exp_avg", "exp_avg_sq")} == {elsewhere}
    assert state["step"].device.type == weight.device.type == "cpu"
    assert parked({"w": weight}, elsewhere)["w"].device == elsewhere

    state["exp_avg"] = state["exp_avg_sq"] = torch.zeros(2, 2)
    unpark(optimizer)
    assert {value.device.type for value in state.values()} == {"cpu"}
