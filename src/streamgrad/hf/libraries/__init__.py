"""What other libraries have done to a model, by its attributes: PEFT, bitsandbytes, DeepSpeed, FSDP2, tensor parallelism."""
