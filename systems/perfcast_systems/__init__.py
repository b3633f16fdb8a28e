"""perfcast_systems"""
