//! `offshoot property`: settings of volumes, subvolumes and files, with the names of `btrfs
//! property`.

use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use offshoot_btrfs::Filesystem;
use offshoot_btrfs_format::TreeId;
use offshoot_vfs::path::{LastLink, at_path, resolve_end, resolve_held};
use offshoot_vfs::{Errno, Error, FileId, FileSystem, FileType, HeldFile, Timestamp, XattrMode};

use super::btrfs::subvolume::set_read_only;
use crate::args::{
    GetPropertyArguments, ListPropertyArguments, Property, PropertyVerb, SetPropertyArguments,
};
use crate::edit::{Caller, Volumes, in_every_tree};
use crate::exit::Result;
use crate::output::{Console, Escaped};
use crate::session::{OpenTree, PlaceSession};

/// The extended attribute that holds the property.
pub(super) const COMPRESSION: &[u8] = b"btrfs.compression";

pub(super) fn run(verb: &PropertyVerb, out: &mut dyn Write, console: &Arc<Console>) -> Result {
    match verb {
        PropertyVerb::Get(arguments) => get(arguments, out, console),
        PropertyVerb::Set(arguments) => set(arguments, console),
        PropertyVerb::List(arguments) => list(arguments, out, console),
    }
}

/// The file whose properties a verb shows or changes.
struct Object<'a> {
    tree: &'a OpenTree,
    path: &'a [u8],
    held: HeldFile<'a>,
}

impl<'a> Object<'a> {
    fn at(tree: &'a OpenTree, path: &'a [u8]) -> Result<Self, Error> {
        Ok(Self { tree, path, held: resolve_held(&**tree, path, LastLink::Follow)? })
    }

    fn file(&self) -> FileId {
        self.held.file()
    }

    /// The subvolume that the file is the root of.
    fn subvolume(&self) -> Result<Option<(&Filesystem, TreeId)>, Error> {
        let OpenTree::Btrfs(fs) = self.tree else { return Ok(None) };
        let id = TreeId(self.file().dev);
        let is_root = fs.volume().filesystem(id)?.root() == self.file();
        Ok(is_root.then_some((fs, id)))
    }

    /// Whether the file can have the property.
    fn knows(&self, property: Property) -> Result<bool, Error> {
        Ok(match property {
            Property::Ro => self.subvolume()?.is_some(),
            Property::Label => self.file() == self.tree.root(),
            Property::Compression => match self.tree {
                OpenTree::Btrfs(fs) => {
                    let file_type = fs.attr(self.file())?.file_type;
                    matches!(file_type, FileType::Regular | FileType::Directory)
                }
                OpenTree::Xfs(_) => false,
            },
        })
    }

    fn require(&self, property: Property) -> Result<(), Error> {
        let name = property.words().0;
        if property != Property::Label {
            self.tree.btrfs(&format!("the property {name}"))?;
        }
        if self.knows(property)? {
            return Ok(());
        }
        let what = format!("{} has no property {name}", Escaped(self.path));
        Err(Error::posix(Errno::INVAL, what))
    }

    /// The value of the property; `None` if it is not set.
    fn get(&self, property: Property) -> Result<Option<Vec<u8>>, Error> {
        match property {
            Property::Ro => {
                let Some((fs, id)) = self.subvolume()? else { return Ok(None) };
                let info = fs.volume().subvolume(id)?;
                Ok(Some(info.is_read_only.to_string().into_bytes()))
            }
            Property::Label => Ok(Some(self.tree.volume().label())),
            Property::Compression => match self.tree.xattr(self.file(), COMPRESSION) {
                Err(Error::Posix { errno: Errno::NODATA, .. }) => Ok(None),
                value => value.map(Some),
            },
        }
    }

    fn set(
        &self,
        property: Property,
        value: &[u8],
        is_forced: bool,
        at: Timestamp,
    ) -> Result<(), Error> {
        let name = property.words().0;
        let wrong = || Error::posix(Errno::INVAL, format!("{name} cannot be {}", Escaped(value)));
        match property {
            Property::Ro => {
                let text = std::str::from_utf8(value).ok();
                let is_read_only = text.and_then(|text| text.parse().ok()).ok_or_else(wrong)?;
                set_read_only(self.tree.btrfs(name)?, self.path, is_read_only, is_forced, at)
            }
            Property::Label => self.tree.volume().set_label(value).map_err(|error| match error {
                Error::Posix { errno: Errno::INVAL, .. } => wrong(),
                other => other,
            }),
            Property::Compression => {
                let set = self.tree.set_xattr(self.file(), COMPRESSION, value, XattrMode::Set, at);
                set.map_err(|error| match error {
                    Error::Posix { errno: Errno::INVAL, .. } => wrong(),
                    other => at_path(other, self.path),
                })
            }
        }
    }
}

fn get(arguments: &GetPropertyArguments, out: &mut dyn Write, console: &Arc<Console>) -> Result {
    let session = PlaceSession::open(&arguments.place, console)?;
    let object = Object::at(&session.fs, &session.path)?;
    if let Some(property) = arguments.name {
        object.require(property)?;
    }
    for property in Property::ALL {
        let is_asked = arguments.name.is_none_or(|name| name == property);
        if !is_asked || !object.knows(property)? {
            continue;
        }
        if let Some(value) = object.get(property)? {
            writeln!(out, "{}={}", property.words().0, Escaped(&value))?;
        }
    }
    Ok(())
}

fn set(arguments: &SetPropertyArguments, console: &Arc<Console>) -> Result {
    let open = &arguments.edit.tree.open;
    let at = Caller::of(open)?.at;
    let places = vec![open.place(&arguments.place)];
    let volumes = Volumes::new(places.iter(), &arguments.edit, console)?;
    in_every_tree(places, volumes, |tree, path, _| {
        let object = Object::at(tree, path)?;
        object.require(arguments.name)?;
        if let Some(rights) = open.rights() {
            let permission = match arguments.name {
                Property::Ro => rights.require_settings(&**tree, object.file()),
                Property::Compression => {
                    let dir =
                        resolve_end(&**tree, path, LastLink::Follow)?.place.map(|(dir, _)| dir);
                    rights.require_change(&**tree, dir, object.file())
                }
                // The label belongs to the volume, and the user who mounted it may change it.
                Property::Label => Ok(()),
            };
            permission.map_err(|error| at_path(error, path))?;
        }
        object.set(arguments.name, arguments.value.as_bytes(), arguments.force, at)
    })
}

fn list(arguments: &ListPropertyArguments, out: &mut dyn Write, console: &Arc<Console>) -> Result {
    let session = PlaceSession::open(&arguments.place, console)?;
    let object = Object::at(&session.fs, &session.path)?;
    for property in Property::ALL {
        if object.knows(property)? {
            let (name, what) = property.words();
            writeln!(out, "{name:<20}{what}")?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use offshoot_btrfs::{BtrfsVolume, EngineOptions};
    use offshoot_device::{BlockDevice, Fault, FaultDevice, FileDevice};
    use offshoot_testkit::btrfs::fixture;

    use super::*;

    /// Otherwise an unreadable subvolume would only be reported as having no property `ro`.
    #[test]
    fn a_device_that_fails_is_told_from_what_is_no_subvolume() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("volume.img");
        fixture::unpack(&image).unwrap();
        let below: Arc<dyn BlockDevice> = Arc::new(FileDevice::open(&image).unwrap());
        let device = Arc::new(FaultDevice::new(below));
        let volume = BtrfsVolume::open(vec![device.clone()], &EngineOptions::default()).unwrap();
        let top = volume.filesystem(TreeId::FS).unwrap();
        let nested = volume.subvolumes().map(Result::unwrap).find(|info| info.parent.is_some());
        let nested = nested.unwrap();
        let path = nested.path.unwrap();
        // The file is as a lookup of the name would return it.
        let file = FileId { dev: nested.id.0, ..top.root() };
        let tree = OpenTree::Btrfs(top.clone());
        let held = HeldFile::new(&top, file).unwrap();
        let object = Object { tree: &tree, path: &path, held };
        device.add(0..1 << 40, Fault::Error);
        for property in [Property::Ro, Property::Compression] {
            assert_eq!(object.knows(property).unwrap_err().errno(), Errno::IO, "{property:?}");
        }
        let held = HeldFile::new(&top, top.root()).unwrap();
        let top = Object { tree: &tree, path: b"/", held };
        assert!(top.knows(Property::Ro).unwrap());
    }
}
