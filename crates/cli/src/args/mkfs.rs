//! The options of `offshoot mkfs`, in the words of `mkfs.btrfs`.

use std::path::PathBuf;

use clap::{ArgAction, Args};
use offshoot_btrfs_format::chunk::Profile;
use offshoot_btrfs_format::csum::ChecksumType;
use uuid::Uuid;

use super::ImageFormat;

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

/// A number of bytes as people write it: `4096`, `1.5G`, `512KiB`. `200MB` is in powers of 1000,
/// as the core utilities have it.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    const UNITS: &str = "KMGTPE";
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let suffix = text[digits.len()..].to_ascii_uppercase();
    let unit = suffix.chars().next();
    let power = unit.and_then(|unit| (1..).zip(UNITS.chars()).find(|one| one.1 == unit));
    let power: Option<u32> = power.map(|(power, _)| power);
    let scale: u128 = match (power, suffix.get(1..).unwrap_or_default()) {
        (Some(power), "" | "IB") => 1 << (10 * power),
        (Some(power), "B") => 1000_u128.pow(power),
        _ if suffix.is_empty() || suffix == "B" => 1,
        _ => {
            return Err(format!(
                "no unit is called {suffix}; there are K, M, G, T, P and E, and KB, MB for powers of 1000"
            ));
        }
    };
    let (whole, part) = digits.split_once('.').unwrap_or((digits, ""));
    let are_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    // No size needs more than 18 digits behind the point, and so many keep the sum below in range.
    let is_number = !whole.is_empty() && are_digits(whole) && are_digits(part) && part.len() <= 18;
    if !is_number || digits.ends_with('.') {
        return Err("a number is expected, as in 4096, 512K or 1.5G".to_owned());
    }
    let too_large = || "more than 16 EiB".to_owned();
    let whole: u64 = whole.parse().map_err(|_| too_large())?;
    let tens: u128 = part.bytes().map(|_| 10).product();
    let part: u128 = if part.is_empty() { 0 } else { part.parse().unwrap_or(0) };
    if part != 0 && scale == 1 {
        return Err("a whole number of bytes is expected".to_owned());
    }
    // The products stay below 2^64 * 2^60 and 10^18 * 2^60, so they fit a `u128`.
    u64::try_from(u128::from(whole) * scale + part * scale / tens).map_err(|_| too_large())
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
    use super::{parse_owner, parse_size};

    #[test]
    fn sizes() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("4k", 4096),
            ("16K", 16384),
            ("3MiB", 3 << 20),
            ("4G", 4 << 30),
            ("16t", 16 << 40),
            ("15P", 15 << 50),
            ("15E", 15 << 60),
            ("1.5G", 3 << 29),
            ("0.3K", 307),
            ("200MB", 200_000_000),
            ("2kB", 2000),
            ("7B", 7),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in [
            "",
            "G",
            "1.5",
            ".5G",
            "1.G",
            "1.2.3K",
            "-1",
            "4X",
            "4KX",
            "4iB",
            "4 G",
            "16E",
            "99999999999999999999",
        ] {
            parse_size(text).expect_err(text);
        }
    }

    #[test]
    fn owners() {
        assert_eq!(parse_owner("1000:100"), Ok((1000, 100)));
        for text in ["", "1000", "a:b", "1:2:3", "-1:0", "4294967296:0"] {
            parse_owner(text).expect_err(text);
        }
    }
}
