//! The options of `offshoot mkfs`: those of btrfs in the words of `mkfs.btrfs`, and those of XFS.

use std::fmt;
use std::path::PathBuf;

use clap::{ArgAction, Args, ValueEnum};
use offshoot_btrfs_format::chunk::Profile;
use offshoot_btrfs_format::csum::ChecksumType;
use uuid::Uuid;

use crate::args::{ImageFormat, parse_size};

pub(crate) const MKFS_HELP: &str = "\
Sizes are in bytes, or as in 512K, 1.5G and 4GiB; 200MB is in powers of 1000. A partition of a disk is \
named as FILE@NUMBER, or by its label or UUID.

With SOURCE_DATE_EPOCH in the environment the volume is made at that time (seconds since 1970) \
and not now. The same options, a UUID among them, then make the same bytes.

Examples:
  offshoot mkfs disk.img --size 4G
  offshoot mkfs disk.img --size 100M --label boot --metadata single
  offshoot mkfs a.img b.img c.img --size 1G --data raid0 --metadata raid1c3
  offshoot mkfs disk.img --size 20M -O mixed-bg,^skinny-metadata
  offshoot mkfs disk.img@2
  offshoot mkfs disk.img --format xfs --size 1G -L data
  offshoot mkfs disk.img --format xfs --size 1G -O ^exchange,^parent
  offshoot mkfs --force /dev/sdb";

/// The format of a new volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum NewVolumeFormat {
    Btrfs,
    Xfs,
}

impl fmt::Display for NewVolumeFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Btrfs => "btrfs",
            Self::Xfs => "XFS",
        })
    }
}

#[derive(Args)]
pub(crate) struct MkfsArguments {
    /// The images or block devices that the volume is made of; one for XFS
    #[arg(value_name = "DEVICE", required = true)]
    pub(crate) devices: Vec<PathBuf>,
    /// Make images of this size; one that is there is made longer, never shorter
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) size: Option<u64>,
    /// Make the volume from this byte of the device on
    #[arg(long, value_name = "BYTES", value_parser = parse_size, conflicts_with = "size")]
    pub(crate) offset: Option<u64>,
    /// What the devices are; otherwise their first bytes say it. A disk whose contents look like
    /// an image is raw
    #[arg(long, value_name = "FORMAT")]
    pub(crate) image_format: Option<ImageFormat>,
    /// Open the backing files that a qcow2 names, too, and what a VMDK names that is no plain file
    /// beside it
    #[arg(long)]
    pub(crate) backing: bool,
    /// Overwrite what is on the devices
    #[arg(short = 'f', long)]
    pub(crate) force: bool,
    /// Write what was made as JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) volume: NewVolumeArguments,
}

/// What a new volume is. `mkfs` and `build` make volumes.
#[derive(Args)]
pub(crate) struct NewVolumeArguments {
    /// The format of the volume
    #[arg(long, value_name = "FORMAT", default_value = "btrfs")]
    pub(crate) format: NewVolumeFormat,
    /// The label, up to 255 bytes; on XFS up to 12
    #[arg(short = 'L', long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub(crate) label: String,
    /// The filesystem id; a random one otherwise
    #[arg(short = 'U', long)]
    pub(crate) uuid: Option<Uuid>,
    /// The size of tree blocks, 4K to 64K: 16K otherwise
    #[arg(short = 'n', long, value_name = "SIZE", value_parser = parse_node_size, help_heading = BTRFS)]
    pub(crate) nodesize: Option<u32>,
    /// The checksum: xxhash, sha256 or blake2; crc32c otherwise
    #[arg(long, value_name = "TYPE", value_parser = parse_checksum, help_heading = BTRFS)]
    pub(crate) csum: Option<ChecksumType>,
    /// The profile of metadata: single, dup, raid0, raid1, raid1c3, raid1c4 or raid10. dup on
    /// one device and raid1 on several otherwise
    #[arg(short = 'm', long, value_name = "PROFILE", value_parser = parse_profile, help_heading = BTRFS)]
    pub(crate) metadata: Option<Profile>,
    /// The profile of data: single otherwise
    #[arg(short = 'd', long, value_name = "PROFILE", value_parser = parse_profile, help_heading = BTRFS)]
    pub(crate) data: Option<Profile>,
    /// Features to turn on, or with ^ off. Of btrfs: mixed-bg, extref, skinny-metadata, no-holes,
    /// free-space-tree, block-group-tree. Of XFS: finobt, inobtcount, rmapbt, reflink, bigtime,
    /// sparse, nrext64, exchange, parent. All but mixed-bg are on by default
    #[arg(short = 'O', long = "features", value_name = "LIST", action = ArgAction::Append)]
    pub(crate) features: Vec<String>,
    /// The owner of the root directory: the caller otherwise
    #[arg(long, value_name = "UID:GID", value_parser = parse_owner)]
    pub(crate) root_owner: Option<(u32, u32)>,
    #[command(flatten)]
    pub(crate) xfs: XfsMkfsArguments,
}

/// The headings of options that volumes of only one format have.
const BTRFS: &str = "Options for btrfs";
const XFS: &str = "Options for XFS";

/// Those that only volumes of XFS have.
#[derive(Args, Clone, Copy)]
#[command(next_help_heading = XFS)]
pub(crate) struct XfsMkfsArguments {
    /// The size of blocks, 1K to 64K: 4K otherwise
    #[arg(long, value_name = "SIZE", value_parser = parse_unit)]
    pub(crate) block_size: Option<u32>,
    /// The size of sectors, 512 to 32K: that of the device otherwise, 512 for an image
    #[arg(long, value_name = "SIZE", value_parser = parse_unit)]
    pub(crate) sector_size: Option<u32>,
    /// The size of inodes, 512 to 2K: 512 otherwise
    #[arg(long, value_name = "SIZE", value_parser = parse_unit)]
    pub(crate) inode_size: Option<u32>,
    /// The size of directory blocks, up to 64K: a block otherwise, and at least 4K
    #[arg(long, value_name = "SIZE", value_parser = parse_unit)]
    pub(crate) dir_block_size: Option<u32>,
    /// The number of allocation groups: 4 otherwise, and more on large volumes and stripes
    #[arg(long, value_name = "COUNT", conflicts_with = "group_size")]
    pub(crate) groups: Option<u32>,
    /// The size of allocation groups, 16M to 1T
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) group_size: Option<u64>,
    /// What one disk of the device holds of a stripe
    #[arg(long, value_name = "SIZE", value_parser = parse_unit, requires = "stripe_width")]
    pub(crate) stripe_unit: Option<u32>,
    /// The data of a whole stripe
    #[arg(long, value_name = "SIZE", value_parser = parse_unit, requires = "stripe_unit")]
    pub(crate) stripe_width: Option<u32>,
    /// The size of the log: at least 64M, and 1/2048 of the volume otherwise
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) log_size: Option<u64>,
    /// What each record of the log fills a multiple of, up to 256K
    #[arg(long, value_name = "SIZE", value_parser = parse_unit)]
    pub(crate) log_stripe: Option<u32>,
    /// How many percent of the volume inodes may take: 25, 5 or 1 otherwise, by its size
    #[arg(long, value_name = "PERCENT")]
    pub(crate) inode_percent: Option<u8>,
}

impl NewVolumeArguments {
    /// An option that was given and that volumes of this format do not have.
    pub(super) fn foreign_option(&self) -> Option<&'static str> {
        let xfs = &self.xfs;
        let given: &[_] = match self.format {
            NewVolumeFormat::Xfs => &[
                ("--nodesize", self.nodesize.is_some()),
                ("--csum", self.csum.is_some()),
                ("--metadata", self.metadata.is_some()),
                ("--data", self.data.is_some()),
            ],
            NewVolumeFormat::Btrfs => &[
                ("--block-size", xfs.block_size.is_some()),
                ("--sector-size", xfs.sector_size.is_some()),
                ("--inode-size", xfs.inode_size.is_some()),
                ("--dir-block-size", xfs.dir_block_size.is_some()),
                ("--groups", xfs.groups.is_some()),
                ("--group-size", xfs.group_size.is_some()),
                ("--stripe-unit", xfs.stripe_unit.is_some()),
                ("--log-size", xfs.log_size.is_some()),
                ("--log-stripe", xfs.log_stripe.is_some()),
                ("--inode-percent", xfs.inode_percent.is_some()),
            ],
        };
        given.iter().find(|(_, is_given)| *is_given).map(|(option, _)| *option)
    }
}

/// A size with 32 bits.
fn parse_unit(text: &str) -> Result<u32, String> {
    u32::try_from(parse_size(text)?).map_err(|_| "it is below 4G".to_owned())
}

/// An owner as two numbers, `UID:GID`.
pub(crate) fn parse_owner(text: &str) -> Result<(u32, u32), String> {
    let pair =
        text.split_once(':').and_then(|(uid, gid)| Some((uid.parse().ok()?, gid.parse().ok()?)));
    pair.ok_or_else(|| "two numbers are expected, as in 1000:1000".to_owned())
}

pub(crate) fn parse_node_size(text: &str) -> Result<u32, String> {
    u32::try_from(parse_size(text)?).map_err(|_| "a node has at most 64K".to_owned())
}

pub(crate) fn parse_profile(text: &str) -> Result<Profile, String> {
    Ok(match text.to_ascii_lowercase().as_str() {
        "single" => Profile::Single,
        "dup" => Profile::Dup,
        "raid0" => Profile::Raid0,
        "raid1" => Profile::Raid1,
        "raid1c3" => Profile::Raid1c3,
        "raid1c4" => Profile::Raid1c4,
        "raid10" => Profile::Raid10,
        "raid5" => Profile::Raid5,
        "raid6" => Profile::Raid6,
        _ => return Err("no such profile".to_owned()),
    })
}

pub(crate) fn parse_checksum(text: &str) -> Result<ChecksumType, String> {
    Ok(match text.to_ascii_lowercase().as_str() {
        "crc32c" => ChecksumType::Crc32c,
        "xxhash" | "xxhash64" => ChecksumType::Xxhash64,
        "sha256" => ChecksumType::Sha256,
        "blake2" | "blake2b" => ChecksumType::Blake2b,
        _ => return Err("no such checksum".to_owned()),
    })
}

#[cfg(test)]
mod tests {
    use super::parse_owner;

    #[test]
    fn owners() {
        assert_eq!(parse_owner("1000:100"), Ok((1000, 100)));
        for text in ["", "1000", "a:b", "1:2:3", "-1:0", "4294967296:0"] {
            parse_owner(text).expect_err(text);
        }
    }
}
