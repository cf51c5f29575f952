"""Kinds of models that other libraries make, from tiny configurations with random weights: nothing is downloaded."""

import functools

import torch
from torch import nn
from torch.nn import functional as F

from tests.catalogue.cases import add, double
from tests.catalogue.parts import CE, Net, classes, images, mlp

#: What keeps a model of any family tiny, and its layers far from a zero function.
TINY = {
    "vocab_size": 7,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
    "initializer_range": 0.5,
}


def next_token(output, ids):
    """Cross-entropy of the next token."""
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def label(output, target):
    """Cross-entropy of one label a sample."""
    return F.cross_entropy(output.logits, target)


def own_loss(output, target):
    """The loss that the model itself returns."""
    return output.loss


def sentences(n=4, length=4):
    """Token ids, none of them padding."""
    return torch.randint(3, 7, (n, length))


def language_model(model):
    """Ids in, the next token out."""
    ids = sentences()
    return model.eval(), next_token, ({"input_ids": ids}, ids)


def tiny_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=4, n_layer=1, n_head=2, n_positions=4, n_inner=4, **TINY))


def gpt2():
    return language_model(tiny_gpt2())


def gpt2_own_loss():
    ids = sentences()
    return tiny_gpt2().eval(), own_loss, ({"input_ids": ids, "labels": ids}, ids)


def without_checkpoints(model):
    twin = double(model)
    twin.gradient_checkpointing_disable()
    return twin


def gpt2_checkpointed():
    from transformers import GPT2Config, GPT2LMHeadModel

    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(n_embd=4, n_layer=1, n_head=2, n_positions=4, n_inner=4, **still, **TINY)
    model, loss, batch = language_model(GPT2LMHeadModel(config))
    model.gradient_checkpointing_enable()
    return model.train(), loss, batch


#: LLaMA and its descendants.
DECODER = {
    **TINY,
    "hidden_size": 4,
    "intermediate_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8,
}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return language_model(LlamaForCausalLM(LlamaConfig(**DECODER)))


def qwen2():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return language_model(Qwen2ForCausalLM(Qwen2Config(**DECODER)))


def bert():
    from transformers import BatchEncoding, BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=7, hidden_size=4, num_hidden_layers=1, num_attention_heads=2, intermediate_size=4,
        max_position_embeddings=4, num_labels=3, initializer_range=0.5,
    )  # fmt: skip
    ids = sentences(8)
    inputs = BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    return BertForSequenceClassification(config).eval(), label, (inputs, torch.randint(0, 3, (8,)))


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=4, num_hidden_layers=1, num_attention_heads=2, intermediate_size=4, image_size=4, patch_size=2,
        num_channels=1, num_labels=3, initializer_range=0.5,
    )  # fmt: skip
    pixels, target = images(8, 1)
    return ViTForImageClassification(config).eval(), label, ({"pixel_values": pixels}, target)


def peft_lora():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(mlp(nn.Tanh()), LoraConfig(r=2, target_modules=["2"], init_lora_weights=False))
    return model.eval(), CE, classes()


def lightning_module():
    import lightning

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = mlp(nn.Tanh())

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, index):
            return CE(self(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    return Classifier(), CE, classes()


def timm_mixer():
    import timm

    model = timm.create_model(
        "mixer_s32_224", img_size=4, patch_size=2, embed_dim=4, num_blocks=1, num_classes=3, in_chans=1
    )
    return model.eval(), CE, images(6, 1)


def tensor_dict_parts(n):
    from tensordict import TensorDict

    x, y = classes(n)
    return TensorDict({"x": x, "labels": y}, batch_size=[n])


def tensor_dict_stream():
    from tensordict.nn import TensorDictModule

    parts = [tensor_dict_parts(8), tensor_dict_parts(5)]
    model = TensorDictModule(mlp(nn.Tanh()), ["x"], ["logits"])
    whole = lambda m: sum(len(td) * CE(m.module(td["x"].double()), td["labels"]) for td in parts) / 13  # noqa: E731
    return model, lambda output, target: CE(output["logits"], target), parts, whole


def nested_parameters():
    from tensordict import TensorDict, TensorDictParams

    inner = {"w": torch.randn(4, 3), "deep": {"v": torch.randn(4, 4)}}
    model = Net(lambda m, x: (x @ m.p["deep", "v"]).tanh() @ m.p["w"], p=TensorDictParams(TensorDict(inner, [])))
    return model, CE, classes()


of_library = functools.partial(add, "Other libraries")
of_library("tensor_dict_stream", "TensorDictModule, a stream of TensorDicts", tensor_dict_stream, "module.2",
    library="tensordict")  # fmt: skip
of_library("nested_parameters", "nested TensorDictParams, which makes parameters of copies", nested_parameters, "p",
    library="tensordict")  # fmt: skip
hugging_face = functools.partial(of_library, library="transformers")
hugging_face("gpt2", "Hugging Face GPT-2", gpt2, "transformer.h.0.mlp.c_fc")
hugging_face("gpt2_own_loss", "Hugging Face GPT-2, the loss that it returns", gpt2_own_loss, "lm_head")
hugging_face("gpt2_checkpointed", "gradient_checkpointing_enable()", gpt2_checkpointed, "lm_head",
    twin=without_checkpoints)  # fmt: skip
hugging_face("llama", "Hugging Face LLaMA", llama, "model.layers.0.mlp.down_proj")
hugging_face("qwen2", "Hugging Face Qwen2", qwen2, "model.layers.0.mlp.down_proj")
hugging_face("bert", "Hugging Face BERT, inputs as a BatchEncoding", bert, "bert.encoder.layer.0.output.dense")
hugging_face("vit", "Hugging Face ViT", vit, "classifier")
of_library("peft_lora", "LoRA by peft", peft_lora, "base_model.model.2.base_layer", library="peft")
of_library("lightning_module", "LightningModule", lightning_module, "net.2", library="lightning")
of_library("timm_mixer", "timm MLP-Mixer", timm_mixer, "head", library="timm")
