"""The inputs of a step that decodes, out of rows that stay on the device, and its tokens back into them."""
