from .._missing import missing_from
from .cosine_similarity_loss import LigerFusedLinearCosineSimilarityLoss
from .cpo_loss import LigerFusedLinearCPOLoss
from .dpo_loss import LigerFusedLinearDPOLoss
from .grpo_loss import LigerFusedLinearGRPOLoss
from .jsd_loss import LigerFusedLinearJSDLoss
from .kto_loss import LigerFusedLinearKTOLoss
from .orpo_loss import LigerFusedLinearORPOLoss
from .simpo_loss import LigerFusedLinearSimPOLoss

__all__ = [
    "LigerFusedLinearCPOLoss",
    "LigerFusedLinearCosineSimilarityLoss",
    "LigerFusedLinearDPOLoss",
    "LigerFusedLinearGRPOLoss",
    "LigerFusedLinearJSDLoss",
    "LigerFusedLinearKTOLoss",
    "LigerFusedLinearORPOLoss",
    "LigerFusedLinearSimPOLoss",
]

__getattr__ = missing_from(__name__)
