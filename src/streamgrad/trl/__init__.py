"""TRL's trainers with streamed models. They need trl: `pip install "streamgrad[trl]"`."""

from streamgrad.trl.trainers import StreamDPOTrainer, StreamGRPOTrainer, StreamSFTTrainer

__all__ = ["StreamDPOTrainer", "StreamGRPOTrainer", "StreamSFTTrainer"]
