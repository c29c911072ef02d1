"""The decoder as graphs: modules, the contract of inputs and outputs, the manifest."""
