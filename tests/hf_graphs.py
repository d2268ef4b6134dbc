# SPDX-License-Identifier: BSD-3-Clause
"""Continuous batching under CUDA graphs, a program of its own: `python hf_graphs.py MODEL ASYNC`.

transformers generates in a thread; if that hangs, this program shows where all threads stand, and
ends, and the tests that started it go on.
"""

import faulthandler
import sys
from unittest import mock

import torch
from hf_fa2 import flash_attention_2
from hf_models import build, check_continuous_batching

SECONDS = 120


def main(model: str, asynchronous: bool) -> None:
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    replays = []
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph):
        replays.append(graph)
        return replay(graph)

    with flash_attention_2() as name, mock.patch.object(torch.cuda.CUDAGraph, "replay", counted):
        net = build(model, name, torch.float32, "cuda").eval()
        check_continuous_batching(net, model, True, asynchronous)
    graphs = len(set(map(id, replays)))
    print(f"{len(replays)} replays of {graphs} graphs")
    assert replays, "nothing was replayed"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "1")
