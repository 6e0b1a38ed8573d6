"""A training by several processes or with accumulated gradients takes the steps of one process with whole batches."""
import os
import socket

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from tests.forked import CONTEXT
from tests.tiny import random_tensor
from train.course import Course, Hyperparameters

NUM_ROWS, NUM_STEPS = 4, 5
PLAN = Hyperparameters("tiny", NUM_STEPS, 0.1, warm_up=1, saved_every=2)


def batch_of(number, num_rows=NUM_ROWS):
    """The rows of a batch, of so many that follow each other."""
    all_rows = random_tensor(3, NUM_ROWS * NUM_STEPS, 6)
    return all_rows[number * num_rows:(number + 1) * num_rows]


def trained(path, accelerator, num_rows=NUM_ROWS):
    """The weights of a small layer after its training."""
    layer = nn.Linear(6, 3, dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    course = Course(PLAN, layer, path, accelerator=accelerator)

    @torch.enable_grad()
    def lesson(number):
        share, loss_sum = course.share, 0.0
        for _, row in share.of(batch_of(number, num_rows)):
            loss = layer(row).cos().sum() * share.num_processes / num_rows
            share.backward(loss)
            loss_sum += float(loss.detach())
        return {"loss": loss_sum}

    course.run(lesson)
    return layer.state_dict()


def train_as(process, port, folder):
    """Train as one of two processes, as `accelerate launch` starts them."""
    os.environ.update(RANK=str(process), LOCAL_RANK=str(process), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    accelerator = Accelerator(cpu=True)
    weights = trained(folder / "training.pt", accelerator)
    torch.save(weights, folder / f"weights{process}.pt")
    accelerator.end_training()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("alone") / "training.pt", Accelerator(cpu=True))


def test_two_processes_end_with_the_weights_of_one(alone, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [CONTEXT.Process(target=train_as, args=(number, port, tmp_path)) for number in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]

    first, second = (torch.load(tmp_path / f"weights{number}.pt", weights_only=True) for number in range(2))
    torch.testing.assert_close(first, alone)
    torch.testing.assert_close(second, first, rtol=0, atol=0)
    kept = torch.load(tmp_path / "training.pt", weights_only=True)
    torch.testing.assert_close(kept["model"], dict(first), rtol=0, atol=0)
    assert kept["step"] == NUM_STEPS


def test_accumulated_halves_are_the_whole_batch(alone, tmp_path):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    halves = trained(tmp_path / "training.pt", accelerator, NUM_ROWS // 2)
    torch.testing.assert_close(halves, alone)
    assert torch.load(tmp_path / "training.pt", weights_only=True)["step"] == NUM_STEPS
