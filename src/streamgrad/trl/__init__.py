"""TRL's trainers, streamed. Needs trl: `pip install "streamgrad[trl]"`."""

from streamgrad.trl.trainers import StreamDPOTrainer, StreamGRPOTrainer, StreamSFTTrainer

__all__ = ["StreamDPOTrainer", "StreamGRPOTrainer", "StreamSFTTrainer"]
