//! The options of `offshoot mkfs`, in the words of `mkfs.btrfs`.

use std::path::PathBuf;

use clap::{ArgAction, Args};
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
  offshoot mkfs --force /dev/sdb";

#[derive(Args)]
pub(crate) struct MkfsArguments {
    /// The images or block devices that the volume is made of
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
    /// The label, up to 255 bytes
    #[arg(short = 'L', long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub(crate) label: String,
    /// The filesystem id; a random one otherwise
    #[arg(short = 'U', long)]
    pub(crate) uuid: Option<Uuid>,
    /// The size of tree blocks, 4K to 64K: 16K otherwise
    #[arg(short = 'n', long, value_name = "SIZE", value_parser = parse_node_size)]
    pub(crate) nodesize: Option<u32>,
    /// The checksum: crc32c, xxhash, sha256 or blake2
    #[arg(long, value_name = "TYPE", default_value = "crc32c", value_parser = parse_checksum)]
    pub(crate) csum: ChecksumType,
    /// The profile of metadata: single, dup, raid0, raid1, raid1c3, raid1c4 or raid10. dup on
    /// one device and raid1 on several otherwise
    #[arg(short = 'm', long, value_name = "PROFILE", value_parser = parse_profile)]
    pub(crate) metadata: Option<Profile>,
    /// The profile of data: single otherwise
    #[arg(short = 'd', long, value_name = "PROFILE", value_parser = parse_profile)]
    pub(crate) data: Option<Profile>,
    /// Features to turn on, or with ^ off: mixed-bg, extref, skinny-metadata, no-holes,
    /// free-space-tree, block-group-tree. All but mixed-bg are on by default
    #[arg(short = 'O', long = "features", value_name = "LIST", action = ArgAction::Append)]
    pub(crate) features: Vec<String>,
    /// Whom the root directory belongs to: the caller otherwise
    #[arg(long, value_name = "UID:GID", value_parser = parse_owner)]
    pub(crate) root_owner: Option<(u32, u32)>,
    /// Overwrite what is on the devices
    #[arg(short = 'f', long)]
    pub(crate) force: bool,
    /// Write what was made as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// An owner as two numbers, `UID:GID`.
fn parse_owner(text: &str) -> Result<(u32, u32), String> {
    let pair =
        text.split_once(':').and_then(|(uid, gid)| Some((uid.parse().ok()?, gid.parse().ok()?)));
    pair.ok_or_else(|| "two numbers are expected, as in 1000:1000".to_owned())
}

pub(crate) fn parse_node_size(text: &str) -> Result<u32, String> {
    u32::try_from(parse_size(text)?).map_err(|_| "a node has at most 64K".to_owned())
}

fn parse_profile(text: &str) -> Result<Profile, String> {
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

fn parse_checksum(text: &str) -> Result<ChecksumType, String> {
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
