//! The features of new volumes, by their names in `mkfs.xfs`.

use offshoot_vfs::{Code, Error, Result};
use offshoot_xfs_format::features::{XfsIncompat, XfsRoCompat};

use super::invalid;

/// The meaning of a name.
enum XfsFeatureMeaning {
    /// A bit of the superblock.
    RoCompat(XfsRoCompat),
    /// The same.
    Incompat(XfsIncompat),
    /// Every volume of version 5 has it.
    Always,
    /// A feature of the format that this engine cannot make.
    NotWritten,
}

/// All known names.
const NAMES: [(&str, XfsFeatureMeaning); 19] = {
    use XfsFeatureMeaning::{Always, Incompat, NotWritten, RoCompat};
    [
        ("finobt", RoCompat(XfsRoCompat::FINOBT)),
        ("inobtcount", RoCompat(XfsRoCompat::INOBTCNT)),
        ("rmapbt", RoCompat(XfsRoCompat::RMAPBT)),
        ("reflink", RoCompat(XfsRoCompat::REFLINK)),
        ("bigtime", Incompat(XfsIncompat::BIGTIME)),
        ("sparse", Incompat(XfsIncompat::SPINODES)),
        ("nrext64", Incompat(XfsIncompat::NREXT64)),
        ("exchange", Incompat(XfsIncompat::EXCHRANGE)),
        ("parent", Incompat(XfsIncompat::PARENT)),
        ("crc", Always),
        ("ftype", Always),
        ("lazy-count", Always),
        ("attr2", Always),
        ("projid32bit", Always),
        ("metadir", NotWritten),
        ("zoned", NotWritten),
        ("ascii-ci", NotWritten),
        ("quota", NotWritten),
        ("realtime", NotWritten),
    ]
};

/// The features of a new volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XfsMkfsFeatures {
    /// Features that a writer must know.
    pub ro_compat: XfsRoCompat,
    /// Features that a reader must know.
    pub incompat: XfsIncompat,
}

/// The features that a reader must know and that we can make.
const MADE_INCOMPAT: XfsIncompat = XfsIncompat::FTYPE
    .union(XfsIncompat::SPINODES)
    .union(XfsIncompat::BIGTIME)
    .union(XfsIncompat::NREXT64)
    .union(XfsIncompat::EXCHRANGE)
    .union(XfsIncompat::PARENT);

impl Default for XfsMkfsFeatures {
    /// The features that `mkfs.xfs` turns on since 6.18: all that this engine can make. Before, it
    /// left out `exchange` and `parent`.
    fn default() -> Self {
        Self { ro_compat: XfsRoCompat::all(), incompat: MADE_INCOMPAT }
    }
}

impl XfsMkfsFeatures {
    /// Turns on the features in `list`, which is separated by commas, and turns off those with a
    /// `^` before their name: `rmapbt,^parent`. Turning off `finobt` turns off `inobtcount`, unless
    /// the list names that too.
    ///
    /// # Errors
    /// `EINVAL` for an unknown name; [`Error::Unsupported`] for a feature that this engine cannot
    /// make, or make without.
    pub fn apply(&mut self, list: &str) -> Result<()> {
        let (mut leaves_out_finobt, mut names_counts) = (false, false);
        for word in list.split(',').filter(|word| !word.is_empty()) {
            let (name, on) = word.strip_prefix('^').map_or((word, true), |name| (name, false));
            let Some((_, meaning)) = NAMES.iter().find(|(known, _)| *known == name) else {
                let known: Vec<_> = NAMES.iter().map(|(name, _)| *name).collect();
                let known = known.join(", ");
                return Err(invalid(format!("XFS has no feature {name}; it has {known}")));
            };
            match meaning {
                XfsFeatureMeaning::RoCompat(bits) => self.ro_compat.set(*bits, on),
                XfsFeatureMeaning::Incompat(bits) => self.incompat.set(*bits, on),
                XfsFeatureMeaning::Always if !on => {
                    let what = format!("making an XFS volume of version 4, without {name}");
                    return Err(Error::unsupported(Code::NewVolume, what));
                }
                XfsFeatureMeaning::NotWritten if on => return Err(not_written(name)),
                XfsFeatureMeaning::Always | XfsFeatureMeaning::NotWritten => {}
            }
            leaves_out_finobt |= name == "finobt" && !on;
            names_counts |= name == "inobtcount";
        }
        if leaves_out_finobt && !names_counts {
            self.ro_compat.remove(XfsRoCompat::INOBTCNT);
        }
        Ok(())
    }

    /// Checks that this engine can make the features, and that they do not contradict each other.
    pub(super) fn verify(self) -> Result<()> {
        let unknown = (self.ro_compat - XfsRoCompat::all()).bits();
        if unknown != 0 {
            return Err(not_written(&format!("unknown features ({unknown:#x})")));
        }
        let foreign = self.incompat - MADE_INCOMPAT;
        if !foreign.is_empty() {
            let names: Vec<_> = foreign.iter_names().map(|(name, _)| name).collect();
            return Err(not_written(&format!("{} ({:#x})", names.join(", "), foreign.bits())));
        }
        if !self.incompat.contains(XfsIncompat::FTYPE) {
            return Err(invalid("every XFS volume of version 5 has ftype"));
        }
        if self.ro_compat.contains(XfsRoCompat::INOBTCNT)
            && !self.ro_compat.contains(XfsRoCompat::FINOBT)
        {
            return Err(invalid("inobtcount needs finobt; leave it out with ^inobtcount"));
        }
        Ok(())
    }
}

fn not_written(what: &str) -> Error {
    Error::unsupported(Code::NewVolume, format!("making an XFS volume with {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_turn_on_and_off() {
        let mut features = XfsMkfsFeatures::default();
        features.apply("^exchange,^parent,crc,^metadir,^finobt").unwrap();
        assert!(!features.incompat.intersects(XfsIncompat::EXCHRANGE | XfsIncompat::PARENT));
        assert_eq!(features.ro_compat, XfsRoCompat::RMAPBT | XfsRoCompat::REFLINK);
        features.apply("").unwrap();
        features.verify().unwrap();
    }

    #[test]
    fn what_is_not_made_is_refused_by_name() {
        for name in ["metadir", "zoned", "ascii-ci", "quota", "realtime", "^crc", "^ftype"] {
            let error = XfsMkfsFeatures::default().apply(name).unwrap_err();
            let name = name.trim_start_matches('^');
            assert!(
                matches!(&error, Error::Unsupported { what, .. } if what.contains(name)),
                "{error}"
            );
        }
        let error = XfsMkfsFeatures::default().apply("rmapbtree").unwrap_err();
        assert!(matches!(error, Error::Posix { .. }), "{error}");
        let incompat = MADE_INCOMPAT | XfsIncompat::METADIR;
        let error = XfsMkfsFeatures { incompat, ..Default::default() }.verify().unwrap_err();
        assert!(error.to_string().contains("METADIR"), "{error}");
    }

    #[test]
    fn counts_of_the_inode_trees_need_both_trees() {
        let mut features = XfsMkfsFeatures::default();
        features.apply("inobtcount,^finobt").unwrap();
        features.verify().unwrap_err();
        features.apply("^inobtcount").unwrap();
        features.verify().unwrap();
    }
}
