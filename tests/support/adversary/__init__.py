"""Scripts drawn from a grammar of what people do, run with stock DeepSpeed and with the package, and judged."""
