"""Hooks, wrappers and precision."""

import functools

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.catalogue.cases import add, double
from tests.catalogue.parts import CE, Net, around, changed, classes, labelled, mlp, reloaded

HOOKS = "Hooks"
hook = functools.partial(add, HOOKS)


def twice(module, args, output):
    return 2 * output


def shifted(module, args):
    return (args[0] + 0.5,)


def only_look(module, grad_input, grad_output):
    return None


def halve(module, grad_input, grad_output):
    return (grad_input[0] * 0.5,)


def hooked(layer, register, hook, activation=None, data=classes, **sizes):
    """An MLP with a hook at a layer."""

    def make():
        model = mlp(activation, **sizes)
        getattr(model[layer], register)(hook)
        return model, CE, data()

    return make


hook("forward-hook", "forward hook",
    hooked(2, "register_forward_hook", twice, data=lambda: labelled(5), sizes=(5, 6, 4, 3)), "2", grid=True,
    psd=True)  # fmt: skip
hook("forward_pre_hook", "forward pre-hook", hooked(0, "register_forward_pre_hook", shifted))
hook("backward_hook", "full backward hook that looks", hooked(2, "register_full_backward_hook", only_look), "2")
hook("changing_backward_hook", "full backward hook that changes the gradient",
    hooked(2, "register_full_backward_hook", halve, nn.Tanh()))  # fmt: skip


WRAPPED = "Wrappers and precision"
wrapped = functools.partial(add, WRAPPED)


def recomputing(m, x):
    """A block whose activations are computed again in the backward pass."""
    h = torch.tanh(m.first(x))
    h = m.block(h) if m.reentrant is None else checkpoint(m.block, h, use_reentrant=m.reentrant)
    return m.head(torch.tanh(h))


def checkpointed(reentrant):
    def make():
        model = Net(recomputing, first=nn.Linear(4, 4), block=around(nn.Linear(4, 3)), head=nn.Linear(3, 3),
                    reentrant=reentrant)  # fmt: skip
        return model, CE, classes()

    return make


def inside(attribute):
    """Twin of a wrapper: the model in it, in float64."""
    return lambda wrapper: double(getattr(wrapper, attribute))


def eager_twin(model):
    return reloaded(model, mlp(nn.Tanh()))


def casting(m, x):
    """A norm that computes in float32 whatever comes in, as many language models have it."""
    h = m.first(x)
    wide = h.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return m.head(F.silu(wide.to(h.dtype)))


def mixed_precision(m, x):
    with torch.autocast("cpu", torch.bfloat16, enabled=m.enabled):
        return m.net(x)


def gathered(model):
    """The whole model from the shards of FSDP2."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    twin = mlp(nn.Tanh())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=False)
    twin.load_state_dict(get_model_state_dict(model, options=options))
    return twin.double()


def fully_sharded():
    from torch.distributed.fsdp import fully_shard

    model = mlp(nn.Tanh())
    fully_shard(model)
    return model, CE, classes()


def in_bfloat16():
    x, y = labelled(5)
    return mlp(sizes=(5, 6, 4, 3)).bfloat16(), CE, (x.bfloat16(), y)


without_checkpoint = changed(lambda twin: setattr(twin, "reentrant", None))
wrapped("checkpoint_reentrant", "activation checkpointing, reentrant", checkpointed(True), "block.0",
    twin=without_checkpoint)  # fmt: skip
wrapped("checkpoint_modern", "activation checkpointing, not reentrant", checkpointed(False), "block.0",
    twin=without_checkpoint)  # fmt: skip
wrapped("compiled", "torch.compile", lambda: (torch.compile(mlp(), backend="eager"), CE, classes()), "2",
    twin=inside("_orig_mod"))  # fmt: skip
wrapped("data_parallel", "DataParallel", lambda: (nn.DataParallel(mlp()), CE, classes()), "2", twin=inside("module"))
wrapped("scripted", "torch.jit.script", lambda: (torch.jit.script(mlp(nn.Tanh())), CE, classes()), "2", twin=eager_twin)
wrapped("bfloat16", "bfloat16 model", in_bfloat16, "2", grid=True, dtype=torch.bfloat16, psd=True)
wrapped("casting", "casts to float32 inside",
    lambda: (Net(casting, first=nn.Linear(4, 3), head=nn.Linear(3, 3)), CE, classes()), "first")  # fmt: skip
wrapped("autocast", "autocast to bfloat16 inside",
    lambda: (Net(mixed_precision, net=mlp(nn.Tanh()), enabled=True), CE, classes()), "net.2",
    twin=changed(lambda twin: setattr(twin, "enabled", False)))  # fmt: skip
wrapped("distributed", "DistributedDataParallel, two processes",
    lambda: (nn.parallel.DistributedDataParallel(mlp(nn.Tanh())), CE, classes()), "2", twin=inside("module"),
    processes=2)  # fmt: skip
wrapped("fully_sharded", "FSDP2 (fully_shard), two processes", fully_sharded, "2", twin=gathered, processes=2)
