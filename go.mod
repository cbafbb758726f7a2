module github.com/metaroce/metaroce

go 1.26.0
