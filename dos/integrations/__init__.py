"""What works this library into others: DeepSpeed ZeRO-3."""
