"""The tiny chat model that ships with NovaInfer: its corpus, tokenizer, training and evaluation."""
