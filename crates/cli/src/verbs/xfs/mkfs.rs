//! The options for a new volume of XFS.

use offshoot_xfs::{XfsMkfsFeatures, XfsMkfsOptions, XfsStripe};
use uuid::Uuid;

use crate::edit::moment;
use crate::exit::Result;
use crate::verbs::mkfs::{NewVolumeArguments, XfsMkfsArguments, usage};

pub(in crate::verbs) fn options(arguments: &NewVolumeArguments) -> Result<XfsMkfsOptions> {
    let mut features = XfsMkfsFeatures::default();
    // One list, as its names may depend on each other.
    features.apply(&arguments.features.join(",")).map_err(usage)?;
    let XfsMkfsArguments {
        block_size,
        sector_size,
        inode_size,
        dir_block_size,
        groups,
        group_size,
        stripe_unit,
        stripe_width,
        log_size,
        log_stripe,
        inode_percent,
    } = arguments.xfs;
    let uuid = arguments.uuid.unwrap_or_else(Uuid::new_v4);
    let defaults = XfsMkfsOptions::new(uuid, moment()?);
    Ok(XfsMkfsOptions {
        label: arguments.label.clone(),
        block_size: block_size.unwrap_or(defaults.block_size),
        sector_size,
        inode_size: inode_size.unwrap_or(defaults.inode_size),
        dir_block_size,
        group_count: groups,
        group_size,
        stripe: stripe_unit.zip(stripe_width).map(|(unit, width)| XfsStripe { unit, width }),
        log_size,
        log_stripe,
        inode_percent,
        features,
        ..defaults
    })
}
