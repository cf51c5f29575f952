"""Recurrent layers and attention of torch."""

import functools

from torch import nn

from tests.catalogue.blocks import Piped, gpt, recurrent, self_attention, step, stirred
from tests.catalogue.cases import add
from tests.catalogue.parts import CE, Net, next_words, tokens, words

SEQUENCES = "Recurrence and attention"
sequence = functools.partial(add, SEQUENCES)


def encoder():
    block = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True)
    return Net(lambda m, x: m.head(m.block(x).mean(1)), block=block, head=nn.Linear(4, 3))


sequence("rnn", "nn.RNN", stirred(lambda: (recurrent(nn.RNN), CE, words(6))), "middle", blocks=True)
sequence("lstm", "nn.LSTM", stirred(lambda: (recurrent(nn.LSTM), CE, words(6))), "middle", blocks=True)
sequence("gru", "nn.GRU", stirred(lambda: (recurrent(nn.GRU), CE, words(6))), "middle", blocks=True)
sequence("lstm-cell", "nn.LSTMCell in a loop", stirred(lambda: (Piped(step(nn.LSTMCell(4, 3)), 3), CE, words(6))),
    "middle.cell", blocks=True)  # fmt: skip
sequence("attention-packed", "nn.MultiheadAttention", stirred(lambda: (Piped(self_attention()), CE, words(4))),
    "middle.attention", blocks=True)  # fmt: skip
sequence("encoder_train", "nn.TransformerEncoderLayer, training mode",
    lambda: (encoder(), CE, tokens()), "block.linear1")  # fmt: skip
sequence("encoder_eval", "nn.TransformerEncoderLayer, evaluation mode (fast path)",
    lambda: (encoder().eval(), CE, tokens()), "block.linear1")  # fmt: skip
sequence("embedding-tied", "embedding tied to the output layer",
    stirred(lambda: (gpt(tied=True), CE, next_words(6))), "lm_head", blocks=True)  # fmt: skip
