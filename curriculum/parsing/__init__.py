"""From the text of a config, or plain JSON, to dataclasses, with every problem at its place."""
