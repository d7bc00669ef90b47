"""Compiled models compute what eager ones do, and other sizes compile nothing again. Run by
test_compile.py.

In a process of its own: the tests' checks of shapes would break the compiled graph.
"""

import copy
import sys
from pathlib import Path

import torch
from torch._dynamo.utils import counters

sys.path.insert(0, str(Path(__file__).parent.parent))
from small_models import contractive_llama, contractive_mamba2, language_model

import deqseq as dq

MAKE = {
    "Mamba2": lambda: contractive_mamba2(n_layers=1, chunk_size=64),
    "Mamba2 in several chunks": lambda: contractive_mamba2(n_layers=1, chunk_size=8),
    "Llama": lambda: contractive_llama(),
}


def eager_and_compiled(lm):
    compiled = copy.deepcopy(lm.double().eval())
    compiled.compile(fullgraph=True, backend="aot_eager")
    return lm, compiled


def implicit(name):
    stop = dq.Stop(rtol=1e-9, max_steps=300)
    return eager_and_compiled(language_model(MAKE[name](), 13, stop=stop))


def graphs():
    return counters["stats"]["unique_graphs"]


def same_gradients(eager, compiled, ids):
    gradients = []
    for lm in (eager, compiled):
        lm(ids, labels=ids).loss.backward()
        gradients.append([p.grad for p in lm.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-8)


def same_tokens(eager, compiled, ids, **options):
    tokens = [lm.generate(ids, max_new_tokens=6, **options).tokens for lm in (eager, compiled)]
    assert torch.equal(*tokens), tokens


def check(name):
    eager, compiled = implicit(name)

    def same(length, sweep):
        """Graphs that this call compiled."""
        before = graphs()
        ids = torch.randint(0, 13, (1, length))
        with torch.no_grad():
            ours, theirs = (lm(ids, sweep=sweep).logits for lm in (compiled, eager))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)
        return graphs() - before

    together = [same(length, dq.Simultaneous()) for length in (9, 31, 20)]
    assert together == [1, 0, 0], together
    # a window that is full, one that is not, one of a single token; each with a past and without
    sliding = [same(length, dq.Sliding(4)) for length in (19, 31, 26, 37)]
    assert 0 < sum(sliding[:2]) <= 6, sliding
    assert sliding[2:] == [0, 0], sliding
    ids = torch.randint(0, 13, (1, 7))
    made = []
    # behind the second prompt the window ends where the cache's memory does, which is another graph
    for prompt in (ids, ids[:, 1:], ids[:, 2:], ids[:, 3:]):
        before = graphs()
        same_tokens(eager, compiled, prompt, sweep=dq.Sliding(4))
        made.append(graphs() - before)
    assert sum(made) <= 6, made
    assert made[2:] == [0, 0], made
    ids = torch.randint(0, 13, (4, 12))
    same_gradients(eager, compiled, ids)
    before = graphs()
    compiled(ids[:3, :9], labels=ids[:3, :9]).loss.backward()
    assert graphs() == before
    print(f"{name}: {graphs()} graphs in all")


def check_chunks(name):
    """A scan over chunks is another function."""
    eager, compiled = implicit(name)
    same_gradients(eager, compiled, torch.randint(0, 13, (2, 20)))
    print(f"{name}: {graphs()} graphs in all")


def check_loop(name):
    """A loop compiles one step, however many it makes; another model of the same sizes compiles
    nothing.
    """
    ids = torch.randint(0, 13, (2, 12))
    for start in ("input", "zero"):
        made = []
        for steps in (2, 5):
            loop = dq.Looped(contractive_llama(n_layers=1), steps, start=start)
            eager, compiled = eager_and_compiled(dq.CausalLM(13, dq.ExplicitModel(loop)))
            before = graphs()
            same_gradients(eager, compiled, ids)
            with torch.no_grad():
                for rows in (ids, ids[:, :9]):
                    assert torch.allclose(eager(rows).logits, compiled(rows).logits, atol=1e-9)
            same_tokens(eager, compiled, ids)
            made.append(graphs() - before)
        assert made[0] <= 5 and made[1] == 0, (start, made)
        print(f"{name}, {start}: {made[0]} graphs")


if __name__ == "__main__":
    checks = {"Looped": check_loop, "Mamba2 in several chunks": check_chunks}
    checks.get(sys.argv[1], check)(sys.argv[1])
