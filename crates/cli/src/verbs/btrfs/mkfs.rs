//! The options for a new volume of btrfs.

use offshoot_btrfs::{MkfsFeatures, MkfsOptions};
use offshoot_btrfs_format::csum::ChecksumType;
use uuid::Uuid;

use crate::edit::moment;
use crate::exit::Result;
use crate::verbs::mkfs::{NewVolumeArguments, usage};

pub(in crate::verbs) fn options(arguments: &NewVolumeArguments) -> Result<MkfsOptions> {
    let mut features = MkfsFeatures::default();
    for list in &arguments.features {
        features.apply(list).map_err(usage)?;
    }
    let fsid = arguments.uuid.unwrap_or_else(Uuid::new_v4);
    Ok(MkfsOptions {
        label: arguments.label.clone(),
        node_size: arguments.nodesize,
        checksum: arguments.csum.unwrap_or(ChecksumType::Crc32c),
        metadata: arguments.metadata,
        data: arguments.data,
        features,
        ..MkfsOptions::new(fsid, moment()?)
    })
}
