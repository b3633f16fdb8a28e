"""Profiles, coefficients and step tables that other tools read, from a server's direct predictions."""

from perfcast_client.exports.files import Export
from perfcast_client.exports.laws import export_llmd_sim, export_wva
from perfcast_client.exports.profile import export_mocker, export_profile
from perfcast_client.exports.tables import export_blis, export_splitwise, export_vidur

__all__ = [
    "Export",
    "export_blis",
    "export_llmd_sim",
    "export_mocker",
    "export_profile",
    "export_splitwise",
    "export_vidur",
    "export_wva",
]
