"""perfcast_engine"""
