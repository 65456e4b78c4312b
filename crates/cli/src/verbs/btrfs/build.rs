//! A volume of btrfs that is filled once.

mod snapshots;

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use offshoot_btrfs::{BtrfsVolume, EngineOptions, Filesystem};
use offshoot_btrfs_format::chunk::Profile;
use offshoot_btrfs_format::dir::{DirItemEntry, file_type};
use offshoot_btrfs_format::edit::{ITEM_SIZE, leaf_capacity};
use offshoot_btrfs_format::encode::dir_entry;
use offshoot_btrfs_format::{DeviceId, Key, TreeId};
use offshoot_device::BlockDevice;
use offshoot_transfer::build::{FileProperty, SourceSize};
use offshoot_vfs::path::{LastLink, at_path, resolve};
use offshoot_vfs::{
    self as vfs, EntryPlace, Errno, FileFlags, FileSystem, FileSystemMut, NewFile, Timestamp,
    Volume,
};

use super::storing::Storing;
use crate::exit::{Result, VerbFailure};
use crate::output::{Console, Escaped};
use crate::verbs::build::FreshVolume;
use crate::verbs::mkfs::NewVolumeArguments;
use crate::verbs::property::COMPRESSION;
pub(in crate::verbs) use snapshots::{NewSnapshot, VolumeSnapshots};

/// The least size of a volume: below it the engine finds no room for chunks of a fitting size.
pub(in crate::verbs) const LEAST_BYTES: u64 = 128 << 20;

/// What a file takes in trees beside its names and attributes, with the leaves that are not full:
/// an inode, its names, an extent, and what the extent tree and the checksums say of that.
const ENTRY_BYTES: u64 = 900;

/// How often a name is in trees.
const NAME_COPIES: u64 = 4;

/// The memory for tree blocks. A build looks at the directories that it fills, and at few others.
const CACHE_BYTES: u64 = 32 << 20;

/// The memory for what is not written yet: data, tree blocks, and those of the transaction before.
const DIRTY_BYTES: u64 = 24 << 20;

/// A subvolume that a build makes.
pub(in crate::verbs) struct NewSubvolume {
    path: Vec<u8>,
    is_read_only: bool,
    is_default: bool,
    /// A source makes it.
    comes_with_source: bool,
}

impl NewSubvolume {
    /// The subvolume that an option names: a path, or a kind, a colon and a path.
    pub(in crate::verbs) fn parse(text: &OsStr) -> Result<Self> {
        let text = text.as_bytes();
        let kinds: [(&[u8], bool, bool); 4] = [
            (b"rw:", false, false),
            (b"ro:", true, false),
            (b"default:", false, true),
            (b"default-ro:", true, true),
        ];
        let of_kind = |&(kind, is_read_only, is_default): &(&[u8], bool, bool)| {
            text.strip_prefix(kind).map(|path| (path.to_vec(), is_read_only, is_default))
        };
        let found = kinds.iter().find_map(of_kind);
        let (path, is_read_only, is_default) = found.unwrap_or((text.to_vec(), false, false));
        let names = || names_of(&path);
        if names().next().is_none() || names().any(|name| name == b"..") {
            let message = format!("{} is no path of a subvolume", Escaped(text));
            return Err(VerbFailure::Usage(message));
        }
        Ok(Self { path, is_read_only, is_default, comes_with_source: false })
    }

    /// The subvolume that a source makes at `path`.
    pub(in crate::verbs) fn of_source(path: &[u8]) -> Self {
        let path = path.to_vec();
        Self { path, is_read_only: false, is_default: false, comes_with_source: true }
    }

    /// Says that a source makes it, and whether it becomes the default subvolume if the option
    /// that names it does not say so.
    pub(in crate::verbs) fn comes_with_its_source(&mut self, is_usual_default: bool) {
        self.comes_with_source = true;
        self.is_default |= is_usual_default;
    }

    /// Whether it is below the directory `path`.
    pub(in crate::verbs) fn is_inside(&self, path: &[u8]) -> bool {
        let (own, outer): (Vec<_>, Vec<_>) =
            (names_of(&self.path).collect(), names_of(path).collect());
        own.len() > outer.len() && own.starts_with(&outer)
    }

    /// Whether it is at `path`.
    pub(in crate::verbs) fn is_at(&self, path: &[u8]) -> bool {
        is_same_path(&self.path, path)
    }

    /// Whether it becomes the default subvolume.
    pub(in crate::verbs) fn is_default(&self) -> bool {
        self.is_default
    }

    /// Where in the volume it is.
    pub(in crate::verbs) fn path(&self) -> &[u8] {
        &self.path
    }

    /// Its id, when it was made.
    fn id(&self, fs: &Filesystem) -> vfs::Result<TreeId> {
        Ok(TreeId(resolve(fs, &self.path, LastLink::Keep)?.dev))
    }
}

/// The names in a path, without `.` and empty ones.
pub(in crate::verbs) fn names_of(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    path.split(|&byte| byte == b'/').filter(|name| !matches!(*name, b"" | b"."))
}

/// Whether both are one path.
pub(in crate::verbs) fn is_same_path(one: &[u8], other: &[u8]) -> bool {
    names_of(one).eq(names_of(other))
}

/// The property that an option names, and the path of its file: the path, a colon, and what `btrfs
/// property` or `chattr` calls it.
pub(in crate::verbs) fn parse_property(text: &OsStr) -> Result<(&[u8], FileProperty)> {
    let text = text.as_bytes();
    let wrong = |what: &str| {
        let shown = Escaped(text);
        Err(VerbFailure::Usage(format!("--property {shown}: {what}")))
    };
    for (flag, flags) in
        [(&b":nodatacow"[..], FileFlags::NODATACOW), (b":nocompress", FileFlags::NOCOMPRESS)]
    {
        if let Some(path) = text.strip_suffix(flag) {
            return Ok((path, FileProperty::Flags(flags)));
        }
    }
    let name = b":compression=";
    let Some(at) = text.windows(name.len()).rposition(|window| window == name) else {
        return wrong("compression=VALUE, nodatacow or nocompress is expected behind PATH:");
    };
    let (path, value) = text.split_at(at);
    let value = value.get(name.len()..).unwrap_or_default();
    match value {
        b"zstd" | b"lzo" | b"zlib" | b"none" | b"no" => {
            let property = FileProperty::Xattr(COMPRESSION.to_vec(), value.to_vec());
            Ok((path, property))
        }
        _ if [&b"zstd:"[..], b"zlib:"].iter().any(|method| value.starts_with(method)) => {
            wrong("the property holds no level; --compress gives that of all files")
        }
        _ => wrong("compression is zstd, lzo, zlib, none or no"),
    }
}

/// Makes the volume as small as it can be, and `slack` bytes longer.
pub(in crate::verbs) fn make_minimal(fs: &Filesystem, slack: u64) -> vfs::Result<()> {
    fs.volume().resize_to_minimum(DeviceId(1), slack).map(drop)
}

/// Makes the subvolumes, and the directories that lead to them, in an empty volume. What the
/// sources have at their paths becomes their contents.
pub(in crate::verbs) fn make_subvolumes(
    fs: &Filesystem,
    subvolumes: &[NewSubvolume],
    new: &NewFile,
) -> vfs::Result<()> {
    let own = subvolumes.iter().filter(|new| !new.comes_with_source);
    let mut paths: Vec<Vec<&[u8]>> = own.map(|new| names_of(&new.path).collect()).collect();
    // One that is inside of another comes behind it.
    paths.sort_by_key(Vec::len);
    for names in paths {
        let fail = |error| at_path(error, &names.join(&b'/'));
        let Some((name, way)) = names.split_last() else { continue };
        let mut dir = fs.root();
        for name in way {
            let made = fs.mkdir(EntryPlace { dir, name }, new);
            dir = match made {
                Err(error) if error.errno() == Errno::EXIST => {
                    fs.lookup(dir, name).map_err(fail)?
                }
                made => made.map_err(fail)?,
            };
        }
        fs.create_subvolume(EntryPlace { dir, name }, new).map_err(fail)?;
    }
    Ok(())
}

/// Makes subvolumes that are filled read-only, and one the default one, as it was asked for.
pub(in crate::verbs) fn settle_subvolumes(
    fs: &Filesystem,
    subvolumes: &[NewSubvolume],
    at: Timestamp,
) -> vfs::Result<()> {
    for subvolume in subvolumes {
        let id = subvolume.id(fs).map_err(|error| at_path(error, &subvolume.path))?;
        if subvolume.is_default {
            fs.volume().set_default_subvolume(id)?;
        }
        if subvolume.is_read_only {
            fs.volume().set_read_only(id, true, at)?;
        }
    }
    Ok(())
}

/// Opens a new volume to be filled. It commits when it must, and at no times of its own, so the
/// same calls make the same volume.
pub(in crate::verbs) fn open_new(
    device: Arc<dyn BlockDevice>,
    storing: Storing,
    console: &Arc<Console>,
) -> vfs::Result<FreshVolume> {
    let console = console.clone();
    let mut options = EngineOptions {
        cache_bytes: CACHE_BYTES,
        dirty_bytes: DIRTY_BYTES,
        commit_interval: None,
        is_reproducible: true,
        reporter: Some(Arc::new(move |report| console.warning(report))),
        ..EngineOptions::default()
    };
    storing.apply_to(&mut options);
    let volume = BtrfsVolume::open_writable(vec![device], &options)?;
    let tree = volume.filesystem(TreeId::FS)?;
    let files = volume.clone().files(TreeId::FS.0)?;
    Ok(FreshVolume { volume, files, btrfs: Some(tree) })
}

/// The longest name and value of an extended attribute, together: both are in one item, which is no
/// larger than a leaf.
pub(in crate::verbs) fn xattr_bytes_max(fs: &Filesystem) -> usize {
    let entry = DirItemEntry {
        location: Key::MIN,
        transid: 0,
        file_type: file_type::XATTR,
        name: b"",
        data: b"",
    };
    let capacity = leaf_capacity(fs.volume().superblock().node_size);
    capacity.saturating_sub(ITEM_SIZE + dir_entry(&entry).len())
}

/// The size of a volume that has room for `size`: an estimate that is rather too large. Compression
/// is left out of it.
pub(in crate::verbs) fn size_for(size: &SourceSize, arguments: &NewVolumeArguments) -> u64 {
    size_for_profiles(size, arguments.data, arguments.metadata)
}

/// The same for these profiles, `None` for the usual ones.
pub(in crate::verbs) fn size_for_profiles(
    size: &SourceSize,
    data: Option<Profile>,
    metadata: Option<Profile>,
) -> u64 {
    let copies = |profile: Option<Profile>, usual| match profile {
        None => usual,
        Some(Profile::Single) => 1,
        Some(_) => 2,
    };
    let data_bytes = size.sector_bytes.saturating_mul(copies(data, 1));
    // Checksums take up to 32 bytes for each sector.
    let items = (size.entries.saturating_mul(ENTRY_BYTES))
        .saturating_add(size.text_bytes.saturating_mul(NAME_COPIES))
        .saturating_add(size.sector_bytes / 128);
    let metadata_bytes = items.saturating_mul(copies(metadata, 2));
    let all = data_bytes.saturating_add(metadata_bytes);
    // Data and metadata have chunks of their own, of a tenth of a small volume and of 1 GiB in a
    // large one, and the last of each is not full.
    let rest = (all / 5).clamp(64 << 20, 3 << 30);
    all.saturating_add(rest).max(LEAST_BYTES).next_multiple_of(1 << 20)
}
