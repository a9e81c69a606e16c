"""From one layout of a tensor to another: steps, the cheapest sequence of them, messages between meshes."""
